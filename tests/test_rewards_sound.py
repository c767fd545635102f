"""Rewards of sound: resampling against the sine it must give, and synchronisation of flashes with clicks."""

import math

import numpy as np
import pytest
import torch
from judge_fixtures import batch
from pydantic import ValidationError

from verst.config.sections import AvSyncReward
from verst.errors import RewardError
from verst.rewards import make_reward
from verst.rewards.av_sync import motion_of, onsets_of, sync
from verst.rewards.clap import windows
from verst.rewards.sound import resample

FPS, RATE = 16.0, 16000
EVENTS = (9, 17, 22, 37, 41, 50)


def clips(shifts, frames=60, size=8):
    """Squares that jump at EVENTS, and clicks `shift` frames after them."""
    media = torch.full((len(shifts), frames, size, size, 3), 60, dtype=torch.uint8)
    audio = torch.zeros(len(shifts), 2, int(frames * RATE / FPS))
    generator = torch.Generator().manual_seed(0)
    for row, shift in enumerate(shifts):
        bright = False
        for event in EVENTS:
            bright = not bright
            media[row, event:] = 200 if bright else 60
            start = int((event + shift) * RATE / FPS)
            audio[row, :, start : start + 1200] = torch.rand(1200, generator=generator) - 0.5
    return {"media": media, "audio": audio, "fps": FPS, "sample_rate": RATE}


def test_clicks_with_the_picture_score_high_and_shifted_ones_low():
    shifts = [0, 1, -1, 4, -5]
    scores = make_reward(AvSyncReward()).score(batch(**clips(shifts)))
    together, late, early, far, further = scores
    # Within 0.1 s, two frames at 16 a second, nothing is lost.
    assert together == pytest.approx(late, abs=0.05) == pytest.approx(early, abs=0.05)
    assert together > 0.5
    assert far < -0.5
    assert further < -0.5
    assert all(-2 <= score <= 2 for score in scores)


def test_the_score_is_the_difference_of_two_pearson_peaks():
    given = batch(**clips([1]))
    motion = motion_of(given.media)[0].numpy()
    wave = given.audio.mean(dim=1)
    onsets = onsets_of(wave, 60, RATE / FPS)[0].numpy()
    levels = np.sqrt(np.square(wave[0].numpy().astype(np.float64)).reshape(60, 1000).mean(axis=1)).clip(1e-4)
    np.testing.assert_allclose(onsets, np.diff(np.log(levels)).clip(0), atol=1e-9)
    grey = given.media[0].double().numpy() @ np.array([0.299, 0.587, 0.114])
    np.testing.assert_allclose(motion, np.abs(np.diff(grey, axis=0)).mean(axis=(1, 2)), atol=1e-4)
    rho = {}
    for shift in range(-8, 9):
        a = motion[max(0, -shift) : 59 - max(0, shift)]
        b = onsets[max(0, shift) : 59 - max(0, -shift)]
        rho[shift] = np.corrcoef(a, b)[0, 1]
    want = max(rho[k] for k in range(-2, 3)) - max(v for k, v in rho.items() if abs(k) > 2)
    assert make_reward(AvSyncReward()).score(given) == [pytest.approx(want, abs=1e-9)]
    assert max(rho, key=lambda k: rho[k]) == 1


def test_silence_and_still_pictures_cannot_be_judged():
    given = clips([0, 0, 0])
    given["audio"][0] = 0
    given["media"][1] = 60
    scores = make_reward(AvSyncReward()).score(batch(**given))
    assert math.isnan(scores[0])
    assert math.isnan(scores[1])
    assert scores[2] > 0.5


def test_a_clips_score_is_its_own():
    shifts = [0, 4, 1]
    reward = make_reward(AvSyncReward())
    together = reward.score(batch(**clips(shifts)))
    given = clips(shifts)
    for row in range(3):
        one = {**given, "media": given["media"][row : row + 1], "audio": given["audio"][row : row + 1]}
        assert reward.score(batch(**one)) == together[row : row + 1]


def test_what_cannot_be_synchronous_is_refused():
    reward = make_reward(AvSyncReward())
    given = clips([0])
    for change, message in [
        ({"audio": None, "sample_rate": None}, "av_sync scores sound"),
        ({"fps": None}, "frames a second"),
        ({"media": given["media"][:, :1]}, "1 frames at 16 a second are too few"),
        ({"fps": 200.0}, "60 frames at 200 a second are too few"),
    ]:
        with pytest.raises(RewardError, match=message):
            reward.score(batch(**{**given, **change}))
    with pytest.raises(ValidationError, match=r"must be larger than rewards\.tolerance_s"):
        AvSyncReward(tolerance_s=0.5, max_shift_s=0.5)


def test_sync_of_equal_series_peaks_at_no_shift():
    generator = torch.Generator().manual_seed(1)
    series = torch.rand(80, generator=generator, dtype=torch.float64)
    assert sync(series, series, 1, 6) > 0.5
    assert sync(series, series.roll(4), 1, 6) < -0.5
    assert math.isnan(sync(series, torch.zeros(80, dtype=torch.float64), 1, 6))


@pytest.mark.parametrize(("old", "new"), [(44100, 48000), (48000, 16000), (16000, 48000), (24000, 44100)])
def test_resampling_keeps_a_sine_and_drops_what_the_rate_cannot_hold(old, new):
    time = torch.arange(old, dtype=torch.float64) / old
    wave = torch.stack([torch.sin(2 * torch.pi * 440 * time), 0.5 * torch.cos(2 * torch.pi * 3000 * time)])
    out = resample(wave.float(), old, new)
    assert out.shape == (2, new)
    at = torch.arange(new, dtype=torch.float64) / new
    want = torch.stack([torch.sin(2 * torch.pi * 440 * at), 0.5 * torch.cos(2 * torch.pi * 3000 * at)])
    middle = slice(new // 10, -new // 10)
    torch.testing.assert_close(out[:, middle].double(), want[:, middle], atol=2e-3, rtol=0)
    if new < old:
        above = torch.sin(2 * torch.pi * (new / 2 * 1.2) * time)[None].float()
        assert float(resample(above, old, new)[:, middle].abs().max()) < 0.02
    assert resample(wave, old, old) is wave


def test_windows_cover_a_long_sound():
    wave = torch.arange(25.0)[None]
    assert windows(wave, 30).shape == (1, 1, 25)
    cut = windows(wave, 10)
    assert cut[0, :, 0].tolist() == [0, 8, 15]
    assert set(cut.flatten().tolist()) == set(range(25))
