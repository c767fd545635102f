"""The asynchronous schedule: which weights sample what, the same bits whatever the timing, killed or not, and refusals."""

from __future__ import annotations

from pathlib import Path

import pytest
from async_fixtures import DECOUPLED, Hook, Killed, assert_same, run_here
from loop_fixtures import on_a_loop
from run_fixtures import metric_rows, recipe_with
from test_dynamic import Engines, setting

from verst.config.recipe import RlRecipe
from verst.errors import ConfigError, EngineError, InvariantError
from verst.loops.explain import explain_ratio
from verst.obs.events import read_events
from verst.obs.images import load_picture
from verst.obs.samples import read_samples, saved_steps
from verst.rollout.ahead import version_of
from verst.rollout.plan import MicrogroupTask
from verst.types import SampleKey


def recipe_of(folder: Path, name: str, *overrides: str, staleness: int = 1, iterations: int = 4) -> RlRecipe:
    small = ("sampling.height=32", "sampling.width=32", f"run.iterations={iterations}", f"run.name={name}")
    schedule = f'schedule={{type="async", staleness={staleness}}}'
    return recipe_with(folder, DECOUPLED, schedule, *small, "trainer.lr=1e-2", *overrides)


def rows_of(recipe: RlRecipe) -> list[dict[str, float]]:
    return metric_rows(recipe.run.folder / recipe.run.name)


def killing(what: str, times: int) -> Hook:
    def hook(now: str, before: int) -> None:
        if (now, before) == (what, times):
            raise Killed(f"{what} {times}")

    return hook


def test_without_staleness_it_is_the_synchronous_run(tmp_path: Path) -> None:
    one = recipe_of(tmp_path, "one", staleness=0, iterations=2)
    two = recipe_of(tmp_path, "two", 'schedule={type="sync"}', "trackers.samples_every=2", iterations=2)
    run_here(one, seed=1)
    run_here(two, seed=2)
    assert_same(one, two)
    assert [row["rollout/staleness_max"] for row in rows_of(one)[1:]] == [0.0, 0.0]
    check_what_people_see(two)


def check_what_people_see(recipe: RlRecipe) -> None:
    """Spread of each group, best and worst samples every second iteration, and the held-out ones."""
    run, rows = recipe.run.folder / recipe.run.name, rows_of(recipe)
    groups = read_events(run / "events" / "groups.jsonl")
    assert [(row["iteration"], row["group"]) for row in groups] == [
        (i, group) for i in (1, 2) for group in range(recipe.rollout.num_groups)
    ]
    for i in (1, 2):
        means = [row["mean"] for row in groups if row["iteration"] == i]
        assert sum(means) / len(means) == pytest.approx(rows[i]["reward/train_mean"], rel=1e-9)
    (step,) = saved_steps(run / "samples", "rollout")
    assert step.name == "step_00000002"
    samples = read_samples(step)
    for row in groups[recipe.rollout.num_groups :]:
        best, worst = [sample for sample in samples if sample["group"] == row["group"]]
        assert (best["rank"], worst["rank"]) == ("best", "worst")
        assert (best["reward"], worst["reward"]) == (row["max"], row["min"])
        assert best["prompt"] == row["prompt"]
        assert len(load_picture(step / best["picture"])) == recipe.sampling.height
    first, last = (read_samples(step) for step in saved_steps(run / "samples", "heldout"))
    assert [sample["seed"] for sample in first] == [sample["seed"] for sample in last]
    for samples, row in ((first, rows[0]), (last, rows[-1])):
        rewards = [sample["reward"] for sample in samples]
        assert len(rewards) == recipe.eval.num_prompts
        assert sum(rewards) / len(rewards) == pytest.approx(row["reward/heldout"], rel=1e-9)


NFT = ('algorithm={type="nft"}', 'sampling.steps={type="none"}', "sampling.shared_initial_noise=false")


@pytest.mark.parametrize(("algorithm", "staleness"), [((DECOUPLED,), 1), (NFT, 2)])
def test_the_same_bits_whatever_the_timing(tmp_path: Path, algorithm: tuple[str, ...], staleness: int) -> None:
    options = ("checkpoint.every=9", *algorithm)
    recipes = [recipe_of(tmp_path, f"run{seed}", *options, staleness=staleness) for seed in range(2)]
    for seed, recipe in enumerate(recipes):
        run_here(recipe, seed=seed)
    assert_same(*recipes)
    rows = rows_of(recipes[0])[1:]
    assert [row["rollout/staleness_mean"] for row in rows] == [min(i, staleness) for i in range(4)]
    assert all(row["train/grad_norm"] > 0 for row in rows)
    if algorithm != NFT:
        assert [row["policy/importance_weight"] == 1.0 for row in rows] == [True, False, False, False]
        assert {row["policy/ratio_max_deviation"] for row in rows} == {0.0}  # the clip is about the weights of now


GUARD = 'algorithm={type="grpo_guard"}'
RECOMPUTED = 'algorithm={type="flow_grpo", old_log_probs="recompute"}'
ASYNC = 'schedule={type="async"}'


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ((ASYNC, RECOMPUTED), r"schedule.staleness = 1 with .* set algorithm.importance_cap, e.g. 2.0"),
        (("rollout.dynamic={enabled=true, staleness=2}", RECOMPUTED), "rollout.dynamic.staleness = 2 with"),
        ((ASYNC, GUARD), 'set algorithm.old_log_probs = "recompute" and algorithm.importance_cap'),
        (("algorithm.importance_cap=2.0",), 'which is 1 with old_log_probs = "rollout"'),
        (('schedule={type="async", staleness=-1}',), "schedule.staleness"),
        (('schedule={type="asink"}',), "did you mean 'async'"),
    ],
)
def test_what_would_train_on_stale_samples_as_if_they_were_fresh_is_refused(
    tmp_path: Path, overrides: tuple[str, ...], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        recipe_with(tmp_path, *overrides)


def test_what_needs_no_weights_is_taken(tmp_path: Path) -> None:
    none = ('sampling.steps={type="none"}', "sampling.shared_initial_noise=false")
    for algorithm in ("nft", "awm", "online_sft"):
        assert recipe_with(tmp_path, ASYNC, f'algorithm={{type="{algorithm}"}}', *none).schedule.staleness == 1
    assert recipe_with(tmp_path, ASYNC).schedule.staleness == 1  # the ratio itself is to the policy that sampled
    assert recipe_with(tmp_path, 'schedule={type="async", staleness=0}', GUARD).schedule.staleness == 0


def test_killed_anywhere_and_resumed_it_ends_with_the_same_bits(tmp_path: Path) -> None:
    """With checkpoints every other iteration: also where some of what was sampled ahead is sampled again."""
    options = ("checkpoint.every=2", "eval.every=2", "eval.num_prompts=1", "eval.batch_size=1")
    calm, stormy = (recipe_of(tmp_path, name, *options, staleness=2, iterations=5) for name in ("calm", "stormy"))
    evaluated = run_here(calm).evaluated
    assert evaluated == [0, 2, 4, 5]  # never the weights of a rollout
    # Before the first checkpoint; in the second; and twice after the first, which holds rollouts 2 and 3 of 4.
    for seed, (what, times) in enumerate([("score", 9), ("save", 1), ("generate", 1), ("update", 1)]):
        with pytest.raises(Killed):
            run_here(stormy, seed=seed, hook=killing(what, times))
    run_here(stormy, seed=9)
    assert_same(calm, stormy)


def test_ctrl_c_keeps_what_was_sampled_ahead(tmp_path: Path) -> None:
    calm, stopped = (recipe_of(tmp_path, name, "checkpoint.every=9") for name in ("calm", "stopped"))
    run_here(calm)
    asked = []

    def hook(what: str, times: int) -> bool:
        # Of rollout 3: it was begun when iteration 3 was, and is given up with it.
        stop = what == "generate" and times == 12
        asked.append(stop)
        return stop

    run_here(stopped, hook=hook)
    assert any(asked)
    (saved,) = (stopped.run.folder / "stopped" / "checkpoints").glob("step_*")
    done = int(saved.name[-1])
    assert done < 4
    assert [path.name for path in (saved / "ahead").iterdir()] == [str(done)]
    again = run_here(stopped, seed=5)
    assert again.counted["generate"] == 4 * (4 - done - 1)  # what was kept is not sampled again
    assert_same(calm, stopped)


def test_a_roll_back_drops_what_was_sampled_ahead(tmp_path: Path) -> None:
    """The second evaluation is worse: its weights, and what they and the ones before sampled, are gone."""
    options = (
        "trainer.lr=0.5",
        "eval.every=1",
        "eval.num_prompts=1",
        "eval.batch_size=1",
        "checkpoint.keep_best=true",
        "checkpoint.keep=9",
        'watch={rollback_lr_factor=0.5, alarms=[{type="reward_drop", drop=1e-9, action="rollback"}]}',
    )
    calm, stormy = (recipe_of(tmp_path, name, *options, staleness=2, iterations=4) for name in ("calm", "stormy"))
    run_here(calm)
    rows = rows_of(calm)
    back = [int(row["iteration"]) for row in rows if "watch/rolled_back_to" in row]
    assert back
    expected = [version_of(number, staleness=2, rollbacks=back) for number in range(4)]
    assert [number - row["rollout/staleness_max"] for number, row in enumerate(rows[1:])] == expected
    with pytest.raises(Killed):
        run_here(stormy, seed=1, hook=killing("update", back[0]))
    run_here(stormy, seed=2)
    assert_same(calm, stormy)


DYNAMIC = (
    'rollout.filters=[{type="reward_range", low=0.45}]',
    "rollout.dynamic={enabled=true, extra=1, staleness=1}",
    "checkpoint.every=1",
    "checkpoint.keep=9",
)


def uneven(key: SampleKey) -> float:
    return ((7 * key.index + 3 * key.group + 5 * key.rollout) % 11) / 11


def test_dynamic_sampling_goes_on_ahead_too(tmp_path: Path) -> None:
    calm, stormy = (recipe_of(tmp_path, name, *DYNAMIC) for name in ("calm", "stormy"))
    world = run_here(calm, score=uneven)
    rows = rows_of(calm)[1:]
    assert sum(row["rollout/groups_filtered"] for row in rows) > 0
    assert sum(row["rollout/groups_kept"] for row in rows) > 0
    assert max(row["rollout/staleness_max"] for row in rows) == 2.0  # kept ones come on top
    found = explain_ratio(calm.run.folder / "calm", 4, 1, 0)
    assert found.checkpoint is not None
    assert (found.checkpoint.name, found.prompt) == ("step_00000002", world.prompts[3, 1])
    assert {step.ratio for step in found.steps} == {1.0}
    with pytest.raises(ConfigError, match="iteration 0 does not say where among the prompts iteration 2 began"):
        explain_ratio(calm.run.folder / "calm", 2, 0, 0)
    with pytest.raises(Killed):
        run_here(stormy, seed=1, score=uneven, hook=killing("update", 2))
    run_here(stormy, seed=2, score=uneven)
    assert_same(calm, stormy)


@on_a_loop
async def test_samples_outside_the_bound_are_refused(tmp_path: Path) -> None:
    recipe, source = setting(tmp_path, "{}", 'schedule={type="async", staleness=1}', DECOUPLED)
    for version in (0, 3):
        engines = Engines()
        ahead = engines.ahead(recipe, source)
        engines.version = version
        ahead.begin(2, weight_version=version)
        for number in (0, 1) if version == 0 else ():
            await ahead.take(number)
        with pytest.raises(
            InvariantError, match=rf"rollout {2 if version == 0 else 0} holds samples of weight versions {version} to"
        ):
            await ahead.take(2 if version == 0 else 0)
        await ahead.close()


@on_a_loop
async def test_a_rollout_that_fails_ahead_of_training_ends_the_run(tmp_path: Path) -> None:
    recipe, source = setting(tmp_path, "{}", 'schedule={type="async", staleness=2}', DECOUPLED)
    engines = Engines()

    async def generate(task: MicrogroupTask) -> bytes:
        if task.rollout == 1:
            raise EngineError("engine 1 is gone")
        return await Engines.generate(engines, task)

    engines.generate = generate  # type: ignore[method-assign]
    ahead = engines.ahead(recipe, source)
    ahead.begin(2, weight_version=0)
    await ahead.take(0)
    with pytest.raises(EngineError, match="engine 1 is gone"):
        await ahead.drained()
    await ahead.close()
