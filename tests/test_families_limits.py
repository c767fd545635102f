"""What a family cannot take is refused by name: over-long prompts, sizes that do not fit, pictures, shifts."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from family_fixtures import generate, request_of, tiny_folder, tiny_image, tiny_worker

from verst.config import RlRecipe, load_recipe
from verst.engine.resolve import resolve
from verst.engine.worker import Worker
from verst.errors import ConfigError, ModelError, PromptError, RequestError
from verst.families import FAMILIES, recognise
from verst.families.base import without_guidance
from verst.loops.matrix import tiny_recipe
from verst.loops.prompt_checks import check_prompts
from verst.types import Geometry

ROOT = Path(__file__).parents[1]
LONG = "a red cat on a table, " * 40


@pytest.mark.parametrize(("name", "scale"), [("krea2", 0.0), ("z-image", 0.0), ("cosmos3-image", 1.0), ("flux1", 1.0)])
def test_what_trains_clean_samples_is_not_guided(name: str, scale: float, tmp_path: Path) -> None:
    """Some families guide from a scale of 0 on, where others sample plainly up to 1."""
    recipe = tiny_recipe(name, "nft", "lora", folder=tmp_path)
    assert recipe.sampling.guidance_scale == scale
    check_prompts(recipe, (), ())
    for other in (0.5, 1.0):
        sampling = recipe.sampling.model_copy(update={"guidance_scale": other})
        changed = recipe.model_copy(update={"sampling": sampling})
        if other == scale or name == "flux1":  # whose model reads the scale, whatever it is
            check_prompts(changed, (), ())
            continue
        with pytest.raises(ConfigError, match=rf"guidance_scale = {other:g} guides .*, and NFT .*; use {scale:g}"):
            check_prompts(changed, (), ())


def test_recipes_of_clean_samples_are_not_guided() -> None:
    seen = 0
    for path in sorted((ROOT / "recipes").glob("*.toml")):
        pipeline = PIPELINES.get(path.stem.rsplit("_", 1)[0])
        recipe = load_recipe(path)
        if pipeline is not None and isinstance(recipe, RlRecipe) and not recipe.algorithm.needs_stochastic_steps:
            assert recipe.sampling.guidance_scale == without_guidance(FAMILIES[pipeline]), path
            seen += 1
    assert seen == len(PIPELINES)


PIPELINES = {
    "cosmos3": "Cosmos3OmniPipeline",
    "cosmos_predict25": "Cosmos2_5_PredictBasePipeline",
    "flux1_dev": "FluxPipeline",
    "flux2_dev": "Flux2Pipeline",
    "flux2_klein": "Flux2KleinPipeline",
    "hunyuan_video": "HunyuanVideoPipeline",
    "hunyuan_video15": "HunyuanVideo15Pipeline",
    "krea2": "Krea2Pipeline",
    "ltx23": "LTX2Pipeline",
    "minimax_h3": "MiniMaxH3ModularPipeline",
    "qwen_image": "QwenImagePipeline",
    "qwen_image_21": "QwenImage21Pipeline",
    "sana": "SanaPipeline",
    "sd35_medium": "StableDiffusion3Pipeline",
    "wan21_1_3b": "WanPipeline",
    "wan22_a14b": "WanPipeline",
    "wan22_ti2v_5b": "WanPipeline",
    "z_image": "ZImagePipeline",
}
"""Recipe name without its algorithm -> pipeline class of its model."""


def test_the_page_has_every_family_and_a_beginning_for_each() -> None:
    page = (ROOT / "docs" / "families.md").read_text()
    assert {name for name in FAMILIES if f"`{name}`" not in page} == set()
    rows = [line.split("|") for line in page.partition("## One by one")[2].partition("\n## ")[0].splitlines()]
    told = {row[1].strip(): row[2] for row in rows if len(row) > 3}
    named = {name for row in told.values() for name in re.findall(r"recipes/(\w+)\.toml", row)}
    there = {path.stem for path in (ROOT / "recipes").glob("*.toml") if not path.stem.startswith("glyphs_")}
    assert named == there
    assert {family for family, row in told.items() if "recipes/" not in row and "verst init" not in row} == {
        "family",
        "---",
    }


@pytest.mark.parametrize("name", ["krea2", "z-image", "sana", "cosmos-predict2.5"])
def test_over_long_prompts_are_named(name: str) -> None:
    worker = tiny_worker(name)
    with pytest.raises(PromptError, match=r"prompt 'a red cat.* tokens.*room is for \d+"):
        generate(worker, request_of(name, prompts=(LONG,)))
    generate(worker, request_of(name, prompts=(LONG,), long_prompts="truncate", rollout=False))


@pytest.mark.parametrize("name", ["krea2", "z-image", "sana", "cosmos-predict2.5"])
def test_the_longest_prompt_that_passes_is_read_to_its_end(name: str) -> None:
    """One more word is one too many, and the last word of the longest still changes what is encoded."""
    worker = tiny_worker(name)
    family, components = worker.family, worker.components
    length = 60
    words = 1
    while not family.check_prompts(components, [" ".join(["cat"] * (words + 1))], max_sequence_length=length):
        words += 1
    assert words < length
    rows = [
        family.encode_prompts(components, [" ".join([*["cat"] * (words - 1), last])], max_sequence_length=length)
        for last in ("cat", "dog")
    ]
    first = next(iter(rows[0]))
    assert rows[0][first].shape != rows[1][first].shape or not torch.equal(rows[0][first], rows[1][first])


@pytest.mark.parametrize("name", ["cosmos3", "minimax-h3"])
def test_a_model_that_never_cuts_takes_any_prompt(name: str) -> None:
    worker = tiny_worker(name)
    assert worker.family.check_prompts(worker.components, [LONG], max_sequence_length=8) == []
    job = resolve(request_of(name, prompts=(LONG,), max_sequence_length=8), worker.components)
    assert worker._encode([job]).positive["text_mask"].shape[1] > 200


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("krea2", {"height": 40}, r"height = 40 .* 16 pixels; nearest that is: 32"),
        ("krea2", {"num_frames": 5}, "makes images"),
        ("z-image", {"width": 24}, r"width = 24 .* 16 pixels; nearest that is: 32"),
        ("z-image", {"num_frames": 2}, "makes images"),
        ("sana", {"height": 48}, r"height = 48 .* 32 pixels"),
        ("sana", {"num_frames": 2}, "makes images"),
        ("cosmos3", {"width": 40}, r"width = 40 .* 16 pixels"),
        ("cosmos3", {"num_frames": 6}, r"num_frames = 6 is not 1 \+ a multiple of 4; nearest that is: 5"),
        ("cosmos-predict2.5", {"height": 40}, r"height = 40 .* 16 pixels"),
        ("cosmos-predict2.5", {"num_frames": 7}, r"nearest that is: 9"),
        ("cosmos-predict2.5", {"sigma_shift": 3.0}, "which has no shift"),
    ],
)
def test_what_does_not_fit_is_refused_with_what_does(name: str, change: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        generate(tiny_worker(name), request_of(name, **change))


@pytest.mark.parametrize("name", ["krea2", "z-image", "sana", "cosmos3", "cosmos-predict2.5", "minimax-h3"])
def test_no_picture_is_taken(name: str) -> None:
    with pytest.raises(RequestError, match="image"):
        generate(tiny_worker(name), request_of(name, image_path=[str(tiny_image(0))]))


@pytest.mark.parametrize("name", ["krea2", "z-image", "sana", "cosmos3", "minimax-h3"])
def test_a_given_shift_replaces_the_checkpoints(name: str) -> None:
    """sigma' = s sigma / (1 + (s - 1) sigma) of a grid without shift."""
    worker = tiny_worker(name)
    geometry = resolve(request_of(name), worker.components).geometry

    def grid(shift: float) -> torch.Tensor:
        return worker.family.schedule(worker.components, geometry, num_steps=5, shift=shift)["visual"].sigmas.double()

    plain = grid(1.0)
    assert torch.allclose(grid(4.0), 4 * plain / (1 + 3 * plain), atol=2e-5)


@pytest.mark.parametrize("name", ["krea2", "z-image", "sana", "cosmos3", "cosmos-predict2.5", "minimax-h3"])
def test_the_same_bits_whether_parameters_want_gradients_or_not(name: str) -> None:
    """An engine's parameters are frozen and a trainer's are not, and torch has other kernels for the two."""
    worker = tiny_worker(name)
    family, transformer = worker.family, worker.components.transformer
    job = resolve(request_of(name), worker.components)
    conditioning = worker._encode([job])
    generator = torch.Generator().manual_seed(3)
    shapes = family.latent_shapes(worker.components, job.geometry)
    x = {stream: torch.randn((1, *shape), generator=generator) for stream, shape in shapes.items()}
    sigmas = {stream: torch.tensor([0.6]) for stream in x}
    results = []
    for trainable in (False, True):
        transformer.requires_grad_(trainable)
        v = family.velocity(transformer, x, sigmas, conditioning, guidance_scale=job.guidance_scale)
        results.append({stream: value.detach() for stream, value in v.items()})
    transformer.requires_grad_(False)
    assert all(torch.equal(results[0][stream], results[1][stream]) for stream in x)


def test_a_distilled_krea2_has_its_own_shift_and_defaults(tmp_path: Path) -> None:
    folder = tmp_path / "krea2"
    shutil.copytree(tiny_folder("krea2"), folder)
    index = json.loads((folder / "model_index.json").read_text())
    (folder / "model_index.json").write_text(json.dumps({**index, "is_distilled": True}))
    family, cpu = recognise(folder), torch.device("cpu")
    components = family.load(folder, parts=("transformer", "scheduler"), dtype=torch.float32, device=cpu)
    defaults = family.sampling_defaults(components)
    assert (defaults.num_steps, defaults.guidance_scale) == (8, 0.0)
    small, large = (
        family.schedule(components, Geometry(height=side, width=side), num_steps=4, shift=None)["visual"].sigmas
        for side in (64, 1024)
    )
    assert torch.equal(small, large)
    assert small[1] == pytest.approx(1 / (1 + torch.e**-1.15 * (1 / 0.75 - 1)), abs=1e-6)


def test_sana_reads_its_instruction_before_a_prompt_and_not_before_a_negative_one() -> None:
    worker = tiny_worker("sana")
    positive, negative = (
        worker.family.encode_prompts(worker.components, ["a cat"], max_sequence_length=32, negative=side)
        for side in (False, True)
    )
    assert positive["encoder_hidden_states"].shape == negative["encoder_hidden_states"].shape
    assert not torch.equal(positive["encoder_hidden_states"], negative["encoder_hidden_states"])


def test_a_family_of_an_installed_package_is_recognised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    info, folder = tmp_path / "own_family-1.0.dist-info", tmp_path / "model"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: own-family\nVersion: 1.0\n")
    lines = ["[verst.families]", "OwnPipeline = own_family:Own", "BrokenPipeline = own_family:Absent"]
    (info / "entry_points.txt").write_text("\n".join(lines))
    (tmp_path / "own_family.py").write_text(
        "from verst.families.sd3 import Sd3\n\n\nclass Own(Sd3):\n    name = 'own'\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    shutil.copytree(tiny_folder("sd3"), folder)
    index = json.loads((folder / "model_index.json").read_text())
    (folder / "model_index.json").write_text(json.dumps({**index, "_class_name": "OwnPipeline"}))
    worker, request = Worker(folder), request_of("sd3", rollout=False)
    assert worker.family.name == "own"
    own, theirs = generate(worker, request), generate(tiny_worker("sd3"), request)
    assert torch.equal(own.samples[0].media, theirs.samples[0].media)
    for name, error, says in (
        (
            "BrokenPipeline",
            ConfigError,
            r"_class_name of .* = 'BrokenPipeline': .*own_family:Absent cannot be imported",
        ),
        ("OtherPipeline", ModelError, r"is a OtherPipeline; known pipelines: .*FluxPipeline, .*OwnPipeline"),
    ):
        (folder / "model_index.json").write_text(json.dumps({**index, "_class_name": name}))
        with pytest.raises(error, match=says):
            recognise(folder)
