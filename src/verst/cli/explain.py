"""`verst explain-ratio`: where one sample's ratio comes from."""

from __future__ import annotations

import re
from pathlib import Path

from verst.cli.options import print_json, waiting
from verst.errors import ConfigError

_SHOWN = 8
"""Differing tensors that are listed for a step."""


def run(folder: Path, iteration: int, sample: str, *, as_json: bool = False, quiet: bool = False) -> None:
    match = re.fullmatch(r"(\d+)\.(\d+)", sample)
    if match is None:
        raise ConfigError(f"sample {sample!r} must read GROUP.INDEX, both from 0, e.g. 3.15")
    with waiting(quiet=quiet or as_json) as tell:
        tell(f"reading {folder}")
        from verst.loops.explain import explain_ratio

        found = explain_ratio(folder, iteration, int(match[1]), int(match[2]), tell=tell)
    if as_json:
        print_json(found)
        return
    print(f"iteration {iteration}, sample {sample}: {found.prompt!r}, seed {found.seed}")
    print(f"weights: {found.checkpoint or 'as the run began'}")
    for step in found.steps:
        print(
            f"step {step.step} (sigma {step.sigma:.4f}): ratio {step.ratio:.9g}, log-prob engine "
            f"{step.log_prob_engine:.9g}, trainer {step.log_prob_trainer:.9g}; {step.compared} tensors compared, "
            f"{len(step.differing)} differ"
        )
        for difference in step.differing[:_SHOWN]:
            shapes = (
                difference.engine
                if difference.engine == difference.trainer
                else (f"engine {difference.engine}, trainer {difference.trainer}")
            )
            print(f"    {difference.name} (call {difference.call}): {difference.largest:.3g}  {shapes}")
    if found.first is None:
        print("Engine and trainer agree in every tensor: before an update this ratio is exactly 1, as it should be.")
        return
    print(f"They part first at: {found.first.name} (step's call {found.first.call}), by {found.first.largest:.3g}.")
    if not found.exact:
        print(
            "This recipe does not ask for exact agreement: run.deterministic = true and trainer.tile_size = "
            "rollout.microgroup_size give engine and trainer batches of one shape."
        )
