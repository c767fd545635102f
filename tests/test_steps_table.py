"""`verst plan --steps`: every family's grid from its scheduler alone, and the proposed window."""

from __future__ import annotations

import io
import math
from pathlib import Path

import pytest
import torch
from family_fixtures import request_of, tiny_folder, tiny_worker
from rich.console import Console

from verst.engine.resolve import resolve
from verst.families import recognise
from verst.families.tiny import TINY
from verst.flow.controller import make_transition
from verst.flow.steps_table import propose_window, step_rows


@pytest.mark.parametrize("name", sorted(TINY))
def test_the_grid_needs_no_weights(name: str) -> None:
    worker = tiny_worker(name)
    geometry = resolve(request_of(name), worker.components).geometry
    family = recognise(tiny_folder(name))
    bare = family.load(tiny_folder(name), parts=("scheduler",), dtype=torch.float32, device=torch.device("cpu"))
    alone = family.schedule(bare, geometry, num_steps=4, shift=None)
    full = worker.family.schedule(worker.components, geometry, num_steps=4, shift=None)
    assert alone.keys() == full.keys()
    for stream, scheduler in alone.items():
        assert torch.equal(scheduler.sigmas, full[stream].sigmas)
        assert scheduler.sigmas[-1] == 0
        assert (scheduler.sigmas[:-1] > scheduler.sigmas[1:]).all()


def test_rows_say_what_a_step_adds() -> None:
    rows = step_rows(torch.tensor([1.0, 0.75, 0.5, 0.25, 0.0]), make_transition("dance", 0.3))
    assert [row.size for row in rows] == [0.25] * 4
    assert [row.noise_std for row in rows] == pytest.approx([0.3 * math.sqrt(0.25)] * 4)
    assert propose_window(rows, size=2) == (0, 3)


def test_a_karras_grid_is_trained_where_it_moves() -> None:
    ramp = torch.linspace(0, 1, 12)
    sigmas = torch.cat([((200.0 ** (1 / 7) + ramp * (0.01 ** (1 / 7) - 200.0 ** (1 / 7))) ** 7), torch.zeros(1)])
    flow = sigmas / (1 + sigmas)  # crowded at 1, as Cosmos' grid is
    low, high = propose_window(step_rows(flow, make_transition("cps", 0.8)), size=2)
    assert 0 <= low < high < 12
    chosen = flow[low : high + 1]
    assert float(chosen[0] - chosen[-1]) > 0.5


def test_plan_prints_them(tmp_path: Path) -> None:
    from verst.cli.plan import print_steps
    from verst.loops.matrix import tiny_recipe
    from verst.loops.planned import steps_of

    out = io.StringIO()
    print_steps(steps_of(tiny_recipe("sd3", "flow_grpo", "lora", folder=tmp_path)), "sde", Console(file=out))
    assert "noise worth training: low = 0, high = 3" in out.getvalue()
