"""An algorithm of the user's own: the page's example, from a file outside verst, by path and by entry point."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from run_fixtures import recipe_with
from trainer_fixtures import gradients, groups_of, one_rank, shares_of

from verst.errors import ConfigError, InvariantError
from verst.loops.batch import make_batch

PAGE = Path(__file__).parents[1] / "docs" / "algorithms.md"
NOISED = ('sampling.steps={type="none"}', "sampling.shared_initial_noise=false")


def example() -> str:
    """The page's Python block."""
    return PAGE.read_text().split("```python\n")[1].split("```")[0]


def section(path: str, more: str = "") -> str:
    return f'algorithm={{type="python", path="{path}", pairs="noised", old_policy="follows"{more}}}'


def test_the_pages_example_is_short() -> None:
    assert len(example().splitlines()) < 30


@pytest.mark.parametrize("by", ["module", "entry_point"])
def test_the_pages_example_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, by: str) -> None:
    (tmp_path / f"mine_{by}.py").write_text(example())
    monkeypatch.setattr(sys, "path", list(sys.path))
    path = f"mine_{by}:Regression"
    if by == "module":
        monkeypatch.chdir(tmp_path)
    else:
        info = tmp_path / "own_algorithm-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: own-algorithm\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[verst.algorithms]\nregression = {path}\n")
        monkeypatch.syspath_prepend(str(tmp_path))
        path = "regression"
    recipe = recipe_with(tmp_path, section(path, ", options={temperature=0.5}"), *NOISED, "trainer.steps_per_rollout=2")
    (share,) = shares_of(recipe)
    with one_rank(recipe) as trainer:
        start = trainer.weights()
        metrics = trainer.update(share)
        assert trainer.old is not None
        moved = [float((value - start[name]).abs().max()) for name, value in trainer.weights().items()]
    assert metrics.num_steps == 2
    assert metrics.grad_norm > 1e-3
    assert max(moved) > 1e-5
    assert metrics.policy["moved"] > 0  # the second step's pairs, against the policy that sampled
    assert metrics.loss > 0


def weighted_by_advantage(tile, policies, scale=1.0):  # type: ignore[no-untyped-def]
    log_ratio = sum(
        ((tile.next_latents[name] - step.mean) ** 2 / (2 * step.std**2)).flatten(1).mean(dim=1)
        for name, step in policies.distribution(tile).items()
    )
    return scale * tile.advantages * log_ratio


def one_number(tile, policies):  # type: ignore[no-untyped-def]
    return weighted_by_advantage(tile, policies).sum()


number = 3


def test_a_function_on_recorded_steps_is_the_policy_gradient(tmp_path: Path) -> None:
    """A (x' - mu)^2 / (2 std^2) has the gradient of Flow-GRPO at a ratio of 1."""
    found = []
    for algorithm in (
        'algorithm={type="flow_grpo"}',
        f'algorithm={{type="python", path="{__name__}:weighted_by_advantage", pairs="recorded"}}',
    ):
        recipe = recipe_with(tmp_path, algorithm, "trainer.grad_clip=1e9", "trainer.lr=0.0")
        (share,) = shares_of(recipe)
        with one_rank(recipe) as trainer:
            trainer.update(share)
            found.append(gradients(trainer))
    grpo, own = found
    size = max(float(grad.abs().max()) for grad in grpo.values())
    for name, gradient in grpo.items():
        torch.testing.assert_close(own[name], gradient, rtol=1e-3, atol=1e-5 * size)


@pytest.mark.parametrize(
    ("path", "more", "message"),
    [
        ("no_such_module_of_ours:f", "", "algorithm.path = 'no_such_module_of_ours:f' cannot be imported"),
        ("absent-name", "", "neither module:object nor an entry point of the group verst.algorithms"),
        (f"{__name__}:number", "", "neither a function nor a class"),
        ("builtins:list", "", "cannot be made with options"),
    ],
)
def test_what_cannot_be_used_is_refused_in_the_driver(tmp_path: Path, path: str, more: str, message: str) -> None:
    recipe = recipe_with(tmp_path, section(path, more), *NOISED)
    with pytest.raises(ConfigError, match=message):
        make_batch(recipe, groups_of(recipe))


def test_a_loss_that_is_not_one_a_pair_stops_the_run(tmp_path: Path) -> None:
    recipe = recipe_with(tmp_path, f'algorithm={{type="python", path="{__name__}:one_number", pairs="recorded"}}')
    (share,) = shares_of(recipe)
    with one_rank(recipe) as trainer, pytest.raises(InvariantError, match=r"one loss a pair, \(2,\)"):
        trainer.update(share)


@pytest.mark.parametrize(
    ("pairs", "steps", "message"), [("noised", "all", "use none"), ("recorded", "none", "nothing to train")]
)
def test_sampling_must_fit_the_pairs(tmp_path: Path, pairs: str, steps: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        recipe_with(
            tmp_path,
            f'algorithm={{type="python", path="mine:f", pairs="{pairs}"}}',
            f'sampling.steps={{type="{steps}"}}',
        )
