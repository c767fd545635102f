"""Condition images of a request: read once, shared by its samples, told apart from others, refused by name."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from family_fixtures import generate, request_of, tiny_image, tiny_worker
from PIL import Image

from verst.engine.images import load_images
from verst.engine.resolve import resolve
from verst.errors import InvariantError, RequestError
from verst.types import Conditioning, join_rows

EDIT, PLUS = "qwen-image-edit", "qwen-image-edit-plus"


def _conditioning(name: str, image: Path) -> Conditioning:
    worker = tiny_worker(name)
    return worker._encode([resolve(request_of(name, image_path=[str(image)]), worker.components)])


@pytest.mark.parametrize(
    ("name", "paths", "message"),
    [
        (EDIT, None, r"names no files, but qwen_image_edit needs 1"),
        (EDIT, [tiny_image(0), tiny_image(1)], r"names 2 files, but qwen_image_edit needs 1"),
        (PLUS, [], r"names no files, but qwen_image_edit_plus needs at least one"),
        ("sd3", [tiny_image(0)], r"names 1 files, but sd3 makes media from text alone"),
        (EDIT, ["nowhere.png"], r"image_path: nowhere.png does not exist"),
        (EDIT, [Path(__file__)], r"test_engine_images.py cannot be read as a picture"),
    ],
)
def test_wrong_images_are_refused_before_anything_is_made(name: str, paths: list[Path] | None, message: str) -> None:
    request = request_of(name, image_path=None if paths is None else [str(path) for path in paths])
    with pytest.raises(RequestError, match=message):
        resolve(request, tiny_worker(name).components)


def test_a_file_that_breaks_off_is_refused(tmp_path: Path) -> None:
    broken = tmp_path / "broken.png"
    broken.write_bytes(tiny_image(0).read_bytes()[:500])
    with pytest.raises(RequestError, match=r"broken.png cannot be read"):
        load_images([str(broken)])


def test_images_are_turned_upright_and_made_rgb(tmp_path: Path) -> None:
    pixels = np.zeros((2, 4, 4), dtype=np.uint8)
    pixels[0, 0] = (200, 100, 50, 255)
    exif = Image.Exif()
    exif[0x0112] = 6  # held with its right side up
    Image.fromarray(pixels).save(tmp_path / "turned.png", exif=exif)
    (image,) = load_images([str(tmp_path / "turned.png")]).pixels
    assert image.shape == (4, 2, 3)
    assert image.dtype == torch.uint8
    assert image[0, 1].tolist() == [200, 100, 50]


def test_an_image_is_encoded_once_and_stands_on_both_sides(monkeypatch: pytest.MonkeyPatch) -> None:
    worker = tiny_worker(EDIT)
    worker.prompt_cache.clear()
    family, calls = worker.family, []

    def counting(*args, **kwargs):
        calls.append(args)
        return type(family).encode_images(family, *args, **kwargs)

    monkeypatch.setattr(family, "encode_images", counting, raising=False)
    request = request_of(EDIT, seeds=(1, 2), rollout_return_denoising_env=True, share_denoising_env=True)
    first, second = generate(worker, request), generate(worker, request)
    assert len(calls) == 1
    conditioning = first.conditioning
    assert conditioning.negative is not None
    latents = conditioning.positive["image_latents_0"]
    assert latents.shape == (2, 1, 4, 16, 64)
    assert torch.equal(latents[0], latents[1])
    assert torch.equal(latents, conditioning.negative["image_latents_0"])
    assert torch.equal(first.samples[0].media, second.samples[0].media)
    assert first.echo["image_path"] == request.image_path
    assert first.echo["images_sha256"] == load_images(request.image_path).digest


def test_the_text_encoder_sees_which_image_it_is() -> None:
    one, other = (_conditioning(EDIT, tiny_image(index)) for index in (0, 2))
    for name in ("encoder_hidden_states", "image_latents_0"):
        assert one.positive[name].shape == other.positive[name].shape
        assert not torch.equal(one.positive[name], other.positive[name])


def test_requests_join_where_their_images_are_of_one_size() -> None:
    worker = tiny_worker(EDIT)
    wide, wide_too, tall = (
        resolve(request_of(EDIT, image_path=[str(tiny_image(index))], rollout=False), worker.components)
        for index in (0, 2, 1)
    )
    assert wide.join_key == wide_too.join_key != tall.join_key
    together, alone = worker._encode([wide, wide_too]), [worker._encode([job]) for job in (wide, wide_too)]
    for row, own in enumerate(alone):
        assert all(torch.equal(together.positive[name][row], value[0]) for name, value in own.positive.items())


def test_rows_with_images_of_another_number_or_size_are_no_batch() -> None:
    parts = [
        {"a": torch.zeros(1, 3, 2), "image_latents_0": torch.zeros(1, 1, 4, *size)} for size in ((2, 2), (2, 2), (4, 2))
    ]
    assert join_rows(parts[:2])["image_latents_0"].shape == (2, 1, 4, 2, 2)
    with pytest.raises(InvariantError, match="image_latents_0 of these rows differ"):
        join_rows(parts)
    with pytest.raises(InvariantError, match="image_latents_1 of these rows differ"):
        join_rows([parts[0], {**parts[1], "image_latents_1": torch.zeros(1, 1, 4, 2, 2)}])


def test_the_size_follows_the_image_where_none_is_asked_for() -> None:
    components = tiny_worker(EDIT).components
    free = request_of(EDIT).model_copy(update={"height": None, "width": None})
    assert (resolve(free, components).geometry.height, resolve(free, components).geometry.width) == (512, 2048)
    tall = free.model_copy(update={"image_path": [str(tiny_image(1))]})
    assert (resolve(tall, components).geometry.height, resolve(tall, components).geometry.width) == (2048, 512)
