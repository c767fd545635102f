"""What follows from alarms and stop rules, what a recipe may ask for, and two whole runs that are watched."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from run_fixtures import base_tables, final_tensors, learned, metric_rows, recipe_with, run_to_end, write_recipe

from verst.config import RlRecipe, parse_recipe
from verst.config.watch import active_alarms
from verst.errors import ConfigError
from verst.loops.replay import replay
from verst.loops.watch import Verdict, Watch
from verst.obs.alarms import ROLLED_BACK_TO
from verst.rollout.plan import MicrogroupTask
from verst.trainer import checkpoint
from verst.trainer.export import find_checkpoint
from verst.types import Microgroup, Scores

KEEP_BEST = "checkpoint.keep_best=true"
BACK = 'watch.alarms=[{type="reward_drop", drop=0.1, action="rollback"}]'


async def no_gold(task: MicrogroupTask, microgroup: Microgroup) -> Scores:
    raise AssertionError("there is no gold reward")


def watch_of(folder: Path, *overrides: str) -> Watch:
    return Watch(recipe_with(folder, *overrides), score_gold=no_gold)


def heard(watch: Watch, heldout: list[float], first: int = 0) -> list[Verdict]:
    """Its verdicts on iterations that were evaluated like this."""
    return [watch.after(first + i, {"reward/heldout": value}) for i, value in enumerate(heldout)]


def test_a_new_best_is_saved_and_a_drop_goes_back_to_it(tmp_path: Path) -> None:
    watch = watch_of(tmp_path, KEEP_BEST, BACK, "watch.rollback_lr_factor=0.5", "watch.max_rollbacks=2")
    values = [0.5, 0.4, 0.8, 0.8, 0.6, 0.75, 0.9, 0.1, 0.2]
    verdicts = heard(watch, values)
    assert [v.is_best for v in verdicts] == [True, False, True, False, False, False, True, False, False]
    assert [v.rollback_to for v in verdicts] == [None, None, None, None, 2, None, None, 6, None]
    assert verdicts[4].metrics == {"alarm/reward_drop": 1.0, ROLLED_BACK_TO: 2.0, "watch/rollbacks": 1.0}
    assert verdicts[7].metrics["watch/rollbacks"] == 2.0
    assert (watch.best, watch.lr_scale) == (6, 0.25)
    # What was undone counts no more, so the next drop is news, but one too many.
    assert verdicts[8].stop is not None
    assert "rolled back 2 times already (watch.max_rollbacks)" in verdicts[8].stop
    assert verdicts[8].rollback_to is None


def test_a_resumed_watch_judges_as_the_killed_one(tmp_path: Path) -> None:
    values = [0.5, 0.4, 0.8, 0.6, 0.75, 0.9, 0.1, 0.85, 0.3]
    overrides = (KEEP_BEST, BACK, "watch.rollback_lr_factor=0.5")
    calm = watch_of(tmp_path, *overrides)
    verdicts = heard(calm, values)
    rows: list[dict[str, Any]] = [
        {"iteration": i, "reward/heldout": value, **verdict.metrics}
        for i, (value, verdict) in enumerate(zip(values, verdicts, strict=True))
    ]
    for done in range(1, len(values)):
        saved = {i for i in range(done) if verdicts[i].is_best}
        watch = watch_of(tmp_path, *overrides)
        watch.resume(rows[:done], saved)
        assert heard(watch, values[done:], first=done) == verdicts[done:]
        assert (watch.best, watch.lr_scale) == (calm.best, calm.lr_scale)


def test_without_a_best_checkpoint_the_run_stops_instead(tmp_path: Path) -> None:
    watch = watch_of(tmp_path, KEEP_BEST, BACK)
    # The recipe kept no best before: the best reading has no checkpoint, and neither has any other.
    watch.resume([{"iteration": 0, "reward/heldout": 0.9}], saved=())
    (verdict,) = heard(watch, [0.1], first=1)
    assert verdict.stop is not None
    assert verdict.stop.endswith("there is no best checkpoint to go back to")


def test_an_alarm_that_logs_is_news_once(tmp_path: Path) -> None:
    watch = watch_of(tmp_path, 'watch.alarms=[{type="reward_drop", drop=0.1}]')
    verdicts = heard(watch, [0.9, 0.7, 0.6, 0.85, 0.5])
    assert [sorted(v.metrics) for v in verdicts] == [
        [],
        ["alarm/reward_drop"],
        ["alarm/reward_drop"],
        [],
        ["alarm/reward_drop"],
    ]
    assert [len(v.raised) for v in verdicts] == [0, 1, 0, 0, 1]
    assert all(v.stop is None and v.rollback_to is None and not v.is_best for v in verdicts)


def test_stop_rules_end_the_run(tmp_path: Path) -> None:
    watch = watch_of(tmp_path, "watch.stop.at_least=0.8", "watch.stop.no_improvement_for=2")
    assert [v.stop is not None for v in heard(watch, [0.5, 0.6, 0.6, 0.7, 0.8])] == [False, False, False, False, True]
    watch = watch_of(tmp_path, "watch.stop.no_improvement_for=2")
    assert [v.stop is not None for v in heard(watch, [0.5, 0.6, 0.6, 0.7, 0.8])] == [False] * 5
    assert [v.stop is not None for v in heard(watch, [0.8, 0.7], first=5)] == [False, True]


NFT = {"algorithm": {"type": "nft"}, "sampling": {"num_steps": 4, "height": 64, "width": 64, "steps": {"type": "none"}}}


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        ({"gold": [{"type": "jpeg_size"}]}, "watch.gold.0: jpeg_size is trained on too"),
        ({"gold": [{"type": "brightness"}] * 2}, "watch.gold: brightness appears twice"),
        ({"gold": [{"type": "brightness", "weight": 0.5}]}, "watch.gold.0.weight = 0.5: a gold reward is never trained on"),
        ({"gold_on_training_every": 2}, "watch.gold_on_training_every = 2 needs a [[watch.gold]] reward"),
        ({"alarms": [{"type": "kl", "above": 0.1}]}, "watch.alarms.0.type = kl can never be raised: algorithm.kl_beta = 0"),
        ({"alarms": [{"type": "reward_hacking"}]}, "can never be raised: there is no [[watch.gold]] reward"),
        ({"alarms": [{"type": "non_finite"}] * 2}, "watch.alarms: type = non_finite appears 2 times"),
        ({"alarms": [{"type": "non_finit"}]}, "watch.alarms.0.type = 'non_finit': did you mean 'non_finite'?"),
        ({"alarms": [{"type": "grad_norm", "action": "rollback"}]}, "set checkpoint.keep_best = true"),
        ({"stop": {"metric": "reward/held"}}, "watch.stop.metric = 'reward/held' is read at no evaluation; one of: reward/heldout"),
        ({"alarms": [{"type": "reward_drop", "metric": "reward/gold/x"}]}, "watch.alarms.0.metric = 'reward/gold/x'"),
        ({"nft": True, "alarms": [{"type": "clip_fraction"}]}, "algorithm.type = nft clips no ratio"),
        ({"nft": True, "alarms": [{"type": "ratio_drift"}]}, "algorithm.type = nft has no ratio of recorded steps"),
    ],
)  # fmt: skip
def test_what_cannot_be_watched_is_refused(tmp_path: Path, tables: dict[str, Any], message: str) -> None:
    nft = NFT if tables.pop("nft", False) else {}
    with pytest.raises(ConfigError) as refusal:
        parse_recipe({**base_tables(tmp_path), **nft, "watch": tables})
    assert message in str(refusal.value)


def test_defaults_are_what_the_algorithm_can_raise(tmp_path: Path) -> None:
    def types(**tables: Any) -> list[str]:
        recipe = parse_recipe({**base_tables(tmp_path), **tables})
        assert isinstance(recipe, RlRecipe)
        return [alarm.type for alarm in active_alarms(recipe.watch, recipe.algorithm, [])]

    assert types() == ["ratio_drift", "zero_signal", "reward_drop", "diversity_collapse"]
    assert types(**NFT) == ["zero_signal", "reward_drop", "diversity_collapse"]
    assert types(watch={"alarms": []}) == []


@pytest.mark.ray
def test_a_roll_back_gives_the_best_weights_and_a_resumed_run_the_same_bits(tmp_path: Path) -> None:
    """The learning rate ruins the model: iteration 1 or 2 is worse than the best before it by anything at all."""
    overrides = ("trainer.lr=0.5", "run.iterations=3", "eval.every=1", KEEP_BEST, "checkpoint.keep=9")
    overrides += ('watch={rollback_lr_factor=0.5, alarms=[{type="reward_drop", drop=1e-9, action="rollback"}]}',)
    recipe, run = write_recipe(tmp_path, *overrides), tmp_path / "runs" / "run"
    code, output = run_to_end(recipe, *overrides)
    assert code == 0, output
    rows, root = metric_rows(run), run / "checkpoints"
    back = next(row for row in rows if ROLLED_BACK_TO in row)
    number, target = back["iteration"], int(back[ROLLED_BACK_TO])
    assert number < 3, "the run is to go on after it"
    assert f"iteration {number}: alarm reward_drop (rollback): reward/heldout is" in output
    assert f"rolled back from iteration {number} to {target}" in output
    event = json.loads((run / "events" / "alarms.jsonl").read_text().splitlines()[0])
    assert (event["iteration"], event["type"], event["action"]) == (number, "reward_drop", "rollback")
    assert rows[number + 1]["train/lr"] == rows[number]["train/lr"] / 2
    assert {"rollout/diversity", "rollout/brightness", "rollout/sharpness"} <= rows[1].keys()

    states = {checkpoint.iteration_of(folder): folder for folder in checkpoint.published(root)}
    best, after = tensors_of(states[target], tmp_path), tensors_of(states[number], tmp_path)
    assert best.keys() == after.keys()
    assert [name for name in best if not torch.equal(best[name], after[name])] == []

    again = asyncio.run(replay(run, number))
    assert again.differences == ()
    assert again.tensors == len(after)

    # As if it had been killed when iteration `number` was saved.
    expected = final_tensors(run)
    for later in (i for i in states if i > number):
        shutil.rmtree(states[later])
    (run / "summary.json").unlink()
    code, output = run_to_end(recipe, *overrides)
    assert code == 0, output
    got = final_tensors(run)
    assert [name for name in expected if not torch.equal(expected[name], got[name])] == []
    assert [learned(row) for row in metric_rows(run)] == [learned(row) for row in rows]
    assert checkpoint.best_folder(root) == find_checkpoint(run, "best")


def tensors_of(folder: Path, scratch: Path) -> dict[str, torch.Tensor]:
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    dcp_to_torch_save(folder / "tensors", scratch / "tensors.pt")
    tensors: dict[str, torch.Tensor] = torch.load(scratch / "tensors.pt")
    return tensors


@pytest.mark.ray
def test_gold_that_falls_while_the_reward_rises_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]))

    def trend(name: str, slope: float) -> str:
        return f'{{type="python", path="run_rewards:Trend", name="{name}", options={{slope={slope}}}}}'

    overrides = ("run.iterations=5", "eval.every=1", f"rewards=[{trend('proxy', 1.0)}]")
    overrides += (
        f"watch={{gold=[{trend('gold', -1.0)}], gold_on_training_every=2, "
        'alarms=[{type="reward_hacking", window=3, action="stop"}]}',
    )
    recipe, run = write_recipe(tmp_path, *overrides), tmp_path / "runs" / "run"
    code, output = run_to_end(recipe, *overrides)
    assert code == 0, output
    rows = metric_rows(run)
    assert [row["iteration"] for row in rows] == [0, 1, 2]
    assert [row.get("alarm/reward_hacking") for row in rows] == [None, None, 1.0]
    assert ["reward/gold_train/gold" in row for row in rows] == [False, False, True]
    gold = [row["reward/gold/gold"] for row in rows]
    assert gold == sorted(gold, reverse=True)
    assert all("reward/gold/mean" not in row and "reward/heldout/gold" not in row for row in rows)
    why = "alarm reward_hacking: reward/gold/gold fell by"
    assert f"ended by the watch: {why}" in output
    assert (run / "checkpoints" / "step_00000002" / "manifest.json").exists()
    code, output = run_to_end(recipe, *overrides)
    assert code == 0
    assert f"{run} is complete: 2 iterations" in output
    assert why in output
    assert metric_rows(run) == rows
