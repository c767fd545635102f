"""An exported LoRA, in plain diffusers: the transformer it is loaded into moves as the engine's does, in every family."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from family_fixtures import call_pipeline, plain_pipeline, request_of, tiny_folder

from verst.engine.resolve import resolve
from verst.engine.worker import Worker
from verst.families.tiny import TINY
from verst.loops.matrix import sample_groups, tiny_recipe, velocity_probe
from verst.trainer.export import write_lora
from verst.weights.lora import LoraSpec, attach_lora, is_lora_parameter


def _load_plain(name: str, out: Path, files: list[Path]) -> Any:
    """What a user of diffusers does with the files."""
    pipeline: Any = plain_pipeline(tiny_folder(name), TINY[name])
    if not hasattr(pipeline, "load_lora_weights"):
        pipeline.transformer.load_lora_adapter(out, prefix=None, weight_name=files[0].name)
        return pipeline
    pipeline.load_lora_weights(out, weight_name=files[0].name)
    if len(files) > 1:
        pipeline.load_lora_weights(out, weight_name=files[1].name, load_into_transformer_2=True)
    return pipeline


def _trained(pipeline: Any, files: list[Path]) -> torch.nn.Module:
    if len(files) == 1:
        return pipeline.transformer
    return torch.nn.ModuleDict({"transformer": pipeline.transformer, "transformer_2": pipeline.transformer_2})


def _picture(worker: Worker, name: str) -> torch.Tensor:
    """The engine's, [F, H, W, C] in 0..1."""
    (records,) = worker.generate([resolve(request_of(name, rollout=False, media_format="float"), worker.components)])
    assert not isinstance(records, Exception)
    pixels: torch.Tensor = records[0]["generated_output"]
    frames = pixels.unsqueeze(1) if pixels.ndim == 3 else pixels
    return frames.permute(1, 2, 3, 0)


@pytest.mark.parametrize("name", sorted(TINY))
def test_plain_diffusers_moves_as_the_engine(name: str, tmp_path: Path) -> None:
    recipe = tiny_recipe(name, "flow_grpo", "lora", folder=tmp_path)
    worker = Worker(recipe.model.path)
    probe = velocity_probe(sample_groups(recipe, worker)[0].microgroups[0], worker)
    module = worker.components.transformer
    base = probe(module)
    attach_lora(module, LoraSpec(rank=2, alpha=6.0, targets=worker.family.lora_targets))
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for parameter_name, p in module.named_parameters():
            if is_lora_parameter(parameter_name):
                p.copy_(torch.randn(p.shape, generator=generator) * 0.1)
    moved = probe(module)
    files = write_lora(module, recipe.model.path, tmp_path / "out")
    pipeline = _load_plain(name, tmp_path / "out", files)
    plain = probe(_trained(pipeline, files))
    for stream, value in moved.items():
        scale = float(value.abs().max())
        assert float((value - base[stream]).abs().max()) > 1e-4 * scale
        assert float((value - plain[stream]).abs().max()) <= 1e-5 * scale
    if TINY[name].euler:
        output = call_pipeline(pipeline, TINY[name], prompt=TINY[name].prompts[0], seed=11)
        frames = next(iter(output.values())) if isinstance(output, dict) else output[0]
        expected = torch.from_numpy(frames[0]).reshape(-1, *frames[0].shape[-3:])
        picture = _picture(worker, name)
        torch.testing.assert_close(picture, TINY[name].as_frames(expected), rtol=0, atol=1e-5)


def test_diffusers_is_the_version_whose_pipelines_we_know() -> None:
    assert diffusers.__version__.startswith("0.42.")
