"""Numbers of pictures alone, against what can be worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest

from verst.rewards.looks import diversity, luma, middle_frame, sharpness, thumbnail


def flat(value: int, height: int = 33, width: int = 50) -> np.ndarray:
    return np.full((height, width, 3), value, dtype=np.uint8)


def test_thumbnail_cells_are_means_whatever_the_size() -> None:
    for height, width in ((16, 16), (64, 48), (33, 50), (5, 17)):
        frame = np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8)
        small = thumbnail(frame)
        rows, columns = ([i * n // 16 for i in range(17)] for n in (height, width))
        for i, j in ((0, 0), (7, 11), (15, 15)):
            cell = frame[rows[i] : max(rows[i] + 1, rows[i + 1]), columns[j] : max(columns[j] + 1, columns[j + 1])]
            assert small[i, j] == pytest.approx(cell.reshape(-1, 3).astype(np.float64).mean(axis=0) / 255, abs=1e-12)


def test_diversity_is_the_mean_distance_of_pairs() -> None:
    assert diversity([flat(10), flat(10), flat(10)]) == 0.0
    assert diversity([flat(0), flat(255)]) == pytest.approx(1.0)
    # Pairs: 51, 102, 51 of 255.
    assert diversity([flat(0), flat(51), flat(102)]) == pytest.approx((0.2 + 0.4 + 0.2) / 3)
    half = flat(0, 32, 32)
    half[:, 16:] = 255
    assert diversity([flat(0, 32, 32), half]) == pytest.approx(0.5)
    with pytest.raises(ValueError, match="got 1"):
        diversity([flat(0)])


def test_sharpness_counts_edges() -> None:
    assert sharpness(flat(77)) == 0.0
    assert sharpness(flat(77, 1, 1)) == 0.0
    stripes = flat(0, 4, 8)
    stripes[:, ::2] = 255
    assert sharpness(stripes) == pytest.approx(0.5)  # every step across is 1, every step down is 0


def test_luma_and_the_frame_that_is_looked_at() -> None:
    assert luma(np.array([255, 0, 0], dtype=np.uint8)) == pytest.approx(0.299)
    clip = np.stack([flat(i) for i in range(5)])
    assert middle_frame(clip)[0, 0, 0] == 2
    assert middle_frame(clip[:1])[0, 0, 0] == 0
