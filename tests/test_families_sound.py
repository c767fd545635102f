"""Recordings as latents, in the families whose autoencoder of sound has an encoder."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from data_fixtures import write_clip
from diffusers import Cosmos3AVAEAudioTokenizer
from family_fixtures import tiny_folder

from verst.config import SftRecipe, parse_recipe
from verst.errors import ConfigError, ModelError
from verst.families import ALL_PARTS, Components, recognise
from verst.families.base import EncodesSound, HasSound
from verst.families.mel import log_mel
from verst.loops.sft_model import load_model
from verst.loops.sft_source import open_source
from verst.types import Geometry


def load(folder: Path) -> Components:
    return recognise(folder).load(folder, parts=ALL_PARTS, dtype=torch.float32, device=torch.device("cpu"))


def slaney(hertz: np.ndarray) -> np.ndarray:
    """Mels: linear to 1000 Hz, logarithmic above."""
    linear = hertz * 3 / 200
    return np.where(hertz < 1000, linear, 15 + 27 * np.log(np.maximum(hertz, 1000) / 1000) / np.log(6.4))


def test_log_mel_is_the_float64_formula() -> None:
    rng, rate, hop, bins, window = np.random.default_rng(0), 16000, 160, 16, 1024
    wave = rng.standard_normal(1600) * 0.1
    padded = np.pad(wave, window // 2, mode="reflect")
    hann = 0.5 - 0.5 * np.cos(2 * np.pi * np.arange(window) / window)
    frames = np.stack([padded[i * hop : i * hop + window] * hann for i in range(1 + len(wave) // hop)])
    spectrum = np.abs(np.fft.rfft(frames))
    edges = np.interp(np.linspace(0, slaney(np.array(8000.0)), bins + 2), slaney(np.arange(8001.0)), np.arange(8001.0))
    hertz = np.arange(window // 2 + 1) * rate / window
    up = (hertz[:, None] - edges[:-2]) / (edges[1:-1] - edges[:-2])
    down = (edges[2:] - hertz[:, None]) / (edges[2:] - edges[1:-1])
    filters = np.maximum(0, np.minimum(up, down)) * 2 / (edges[2:] - edges[:-2])
    expected = np.log(np.maximum(spectrum @ filters, 1e-5))
    got = log_mel(torch.tensor(wave, dtype=torch.float32).view(1, 1, -1), sample_rate=rate, hop=hop, bins=bins)
    np.testing.assert_allclose(got[0, 0].numpy(), expected, atol=2e-3)


@pytest.mark.parametrize(
    ("name", "geometry"),
    [
        ("ltx2", Geometry(height=32, width=32, num_frames=9, fps=24.0)),
        ("ltx2.3", Geometry(height=32, width=32, num_frames=17, fps=25.0)),
        ("minimax-h3", Geometry(height=32, width=32, num_frames=124, fps=24.0)),
    ],
)
def test_sound_has_the_latents_that_are_denoised_and_each_row_its_own(name: str, geometry: Geometry) -> None:
    components = load(tiny_folder(name))
    family = components.family
    assert isinstance(family, EncodesSound)
    assert isinstance(family, HasSound)
    rate, channels = family.sound_format(components)
    length = round(geometry.num_frames / (geometry.fps or 24) * rate)
    audio = torch.randn(2, channels, length, generator=torch.Generator().manual_seed(0)) * 0.1
    x0 = family.encode_audio(components, audio, geometry)["audio"]
    assert tuple(x0.shape[1:]) == family.latent_shapes(components, geometry)["audio"]
    alone = family.encode_audio(components, audio[1:], geometry)["audio"]
    torch.testing.assert_close(alone, x0[1:], atol=1e-4, rtol=1e-4)
    assert not torch.allclose(x0[0], x0[1])


def test_normalised_sound_is_the_inverse_of_what_decoding_undoes() -> None:
    """decode_audio hands the autoencoder's decoder exactly what its encoder gave."""
    components = load(tiny_folder("ltx2"))
    family, vae, geometry = (
        components.family,
        components.modules["audio_vae"],
        Geometry(height=32, width=32, num_frames=9, fps=24.0),
    )
    assert isinstance(family, EncodesSound)
    assert isinstance(family, HasSound)
    vae.latents_mean.normal_()
    vae.latents_std.uniform_(0.5, 2.0)
    audio, seen = torch.randn(1, 2, 6000) * 0.1, []
    handles = [vae.encoder.register_forward_hook(lambda m, i, out: seen.append(out.chunk(2, dim=1)[0])),
               vae.decoder.register_forward_pre_hook(lambda m, args: seen.append(args[0]))]  # fmt: skip
    family.decode_audio(components, family.encode_audio(components, audio, geometry))
    for handle in handles:
        handle.remove()
    torch.testing.assert_close(seen[0], seen[1], atol=1e-5, rtol=1e-5)


def test_cosmos3_with_and_without_an_encoder(tmp_path: Path) -> None:
    components = load(tiny_folder("cosmos3"))
    family = components.family
    assert isinstance(family, EncodesSound)
    with pytest.raises(ModelError, match=r"sound_tokenizer holds a decoder alone"):
        family.sound_format(components)
    folder = tmp_path / "model"
    shutil.copytree(tiny_folder("cosmos3"), folder)
    own = components.modules["sound_tokenizer"].config
    with_encoder = Cosmos3AVAEAudioTokenizer(
        **{k: own[k] for k in ("sampling_rate", "vocoder_input_dim", "dec_dim", "dec_c_mults", "dec_strides")},
        enc_dim=4, enc_latent_dim=2 * own["vocoder_input_dim"], enc_c_mults=(1, 1, 1, 1), enc_strides=(2, 4, 5, 6),
        enc_num_blocks=1, enc_n_fft=32, enc_hop_length=8, encoder_enabled=True,
    )  # fmt: skip
    with_encoder.save_pretrained(folder / "sound_tokenizer")
    components = load(folder)
    geometry = Geometry(height=48, width=32, num_frames=5, fps=24.0)
    x0 = family.encode_audio(components, torch.randn(1, 2, 10000) * 0.1, geometry)["audio"]
    assert tuple(x0.shape[1:]) == family.latent_shapes(components, geometry)["audio"]


def test_dropped_captions_of_a_model_that_cannot_say_nothing(tmp_path: Path) -> None:
    write_clip(tmp_path / "set" / "a.mp4", frames=130, sound_s=5.5)
    write_clip(tmp_path / "set" / "b.mp4", frames=130, sound_s=5.5)
    for name in ("a", "b"):
        (tmp_path / "set" / f"{name}.txt").write_text("a clip")
    recipe = parse_recipe(
        {
            "run": {"name": "r", "folder": str(tmp_path), "iterations": 1, "device": "cpu"},
            "model": {"path": str(tiny_folder("minimax-h3"))},
            "sampling": {"height": 32, "width": 32, "num_frames": 124},
            "data": {"type": "folder", "path": str(tmp_path / "set"), "heldout": 1},
            "algorithm": {"type": "sft", "batch_size": 1},
            "trainer": {"tile_size": 1},
        }
    )
    assert isinstance(recipe, SftRecipe)
    components = load_model(recipe, torch.device("cpu"))
    with pytest.raises(ConfigError, match=r"algorithm\.caption_dropout: prompt '' has no tokens.*set it to 0"):
        open_source(recipe, components, tmp_path, [])
