"""`import verst` from Python: recipes, whole runs and their events, an engine and a trainer in this process."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
import run_rewards
import torch
from loop_fixtures import on_a_loop
from PIL import Image
from run_fixtures import base_tables, recipe_with, tiny_model, write_recipe
from torch import Tensor
from trainer_fixtures import LORA, one_rank, shares_of

import verst
from verst.api import events as api_events
from verst.errors import ConfigError, InvariantError, RequestError, SyncError
from verst.loops.run_folder import RunFolder
from verst.obs.metrics import MetricsLog
from verst.trainer.checkpoint import publish


def sft_recipe(folder: Path, **run: Any) -> verst.SftRecipe:
    base = base_tables(folder)
    recipe = verst.Recipe.load(
        {
            "run": {**base["run"], "name": "sft", "iterations": 4, **run},
            "model": base["model"],
            "sampling": {"height": 32, "width": 32, "num_steps": 2},
            "prompts": base["prompts"],
            "data": {"type": "text_lines", "prompts": str(folder / "train.txt"), "fonts": ["DejaVuSans.ttf"]},
            "rewards": [{"type": "brightness"}],
            "algorithm": {"type": "sft", "batch_size": 2},
            "trainer": {"tile_size": 2, "lr": 1e-3},
            "checkpoint": {"every": 2},
            "eval": {"every": 2, "num_prompts": 2, "grid": 2},
            "trackers": {"tensorboard": False},
        }
    )
    assert isinstance(recipe, verst.SftRecipe)
    return recipe


def kinds(events: list[verst.Event]) -> list[tuple[str, int]]:
    return [(type(event).__name__, event.iteration) for event in events]


WHOLE_SFT = [
    ("HeldOutSampled", 0),
    ("IterationDone", 0),
    ("IterationDone", 1),
    ("HeldOutSampled", 2),
    ("IterationDone", 2),
    ("CheckpointSaved", 2),
    ("IterationDone", 3),
    ("HeldOutSampled", 4),
    ("IterationDone", 4),
    ("CheckpointSaved", 4),
    ("RunEnded", 4),
]


def test_importing_verst_and_loading_a_recipe_loads_no_torch(tmp_path: Path) -> None:
    path = write_recipe(tmp_path)
    code = (
        f"import sys, verst; recipe = verst.Recipe.load({str(path)!r}, 'trainer.lr=2e-4'); verst.train; verst.events; "
        "print(recipe.trainer.lr, *sorted({'torch', 'ray', 'diffusers'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["0.0002"]


def test_every_name_that_is_listed_is_there() -> None:
    names = {name for name in dir(verst) if not name.startswith("_")}
    assert {"Recipe", "train", "events", "stream", "Engine", "Trainer", "Result", "with_rewards", "picture"} <= names
    assert {"plan", "simulate", "evaluate", "export", "triage", "trace", "replay", "explain_ratio"} <= names
    for name in names:
        assert getattr(verst, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'trian'"):
        verst.trian  # noqa: B018


def test_tables_are_a_recipe_and_stay_as_they_are(tmp_path: Path) -> None:
    tables = base_tables(tmp_path)
    recipe = verst.Recipe.load(tables, "trainer.lr=5e-4", "rewards.0.weight=2.0")
    assert (recipe.trainer.lr, recipe.rewards[0].weight) == (5e-4, 2.0)
    assert (tables["trainer"]["lr"], tables["rewards"]) == (1e-3, [{"type": "jpeg_size"}])
    with pytest.raises(ConfigError, match=r"trainer\.learning_rate.*did you mean 'lr'"):
        verst.Recipe.load(tables, "trainer.learning_rate=1")


# ------------------------------------------------------------------------------------------------- rewards of one's own


@pytest.fixture
def beside_the_rewards(monkeypatch: pytest.MonkeyPatch) -> None:
    """Worker processes search the current folder."""
    monkeypatch.chdir(Path(__file__).parent)


def test_a_module_that_only_this_process_finds_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"run_rewards:bright: this process finds the module by .* PYTHONPATH"):
        verst.with_rewards(recipe_with(tmp_path), {"bright": run_rewards.bright})


@pytest.mark.usefixtures("beside_the_rewards")
def test_a_function_becomes_a_reward_that_other_processes_find(tmp_path: Path) -> None:
    recipe = verst.with_rewards(recipe_with(tmp_path), {"broken": run_rewards.broken, "trend": run_rewards.Trend})
    assert [(r.type, r.name, r.weight) for r in recipe.rewards] == [("python", "broken", 1), ("python", "trend", 1)]
    assert [r.model_dump()["path"] for r in recipe.rewards] == ["run_rewards:broken", "run_rewards:Trend"]
    table = '[{type="python", path="run_rewards:broken", name="trend", weight=3.0, options={slope=0.1}}]'
    kept = verst.with_rewards(recipe_with(tmp_path, f"rewards={table}"), {"trend": run_rewards.Trend})
    (reward,) = [r.model_dump() for r in kept.rewards]
    assert (reward["path"], reward["weight"], reward["options"]) == ("run_rewards:Trend", 3.0, {"slope": 0.1})


def test_what_a_worker_could_not_import_is_refused_with_the_remedy(tmp_path: Path) -> None:
    def local(media: Tensor, prompts: list[str]) -> list[float]:
        return [0.0] * len(prompts)

    def script(media: Tensor, prompts: list[str]) -> list[float]:
        return [0.0] * len(prompts)

    script.__module__, script.__qualname__ = "__main__", "script"

    def shadowed(media: Tensor, prompts: list[str]) -> list[float]:
        return [0.0] * len(prompts)

    shadowed.__module__, shadowed.__qualname__ = "run_rewards", "broken"
    recipe = recipe_with(tmp_path)
    for target, says in (
        (lambda media, prompts: [0.0], r"rewards\['r'\].*a lambda.*from my_rewards import r"),
        (local, r"rewards\['r'\] = .*local is defined inside a function; .*my_rewards\.py"),
        (script, r"rewards\['r'\] = __main__:script is defined in the script or notebook"),
        (shadowed, r"importing run_rewards:broken gives another object"),
        (run_rewards.Trend(0.1), r"neither a function nor a class; give `def r\(media, prompts\)`"),
    ):
        with pytest.raises(ConfigError, match=says):
            verst.train(recipe, rewards={"r": target})
    assert not (tmp_path / "runs").exists()


# ---------------------------------------------------------------------------------------------------------- whole runs


def test_a_run_is_trained_and_its_result_read_back(tmp_path: Path) -> None:
    recipe = sft_recipe(tmp_path)
    result = verst.train(recipe, quiet=True)
    assert (result.complete, result.iterations, result.folder) == (True, 4, tmp_path / "runs" / "sft")
    iterations, values = result.series("reward/heldout")
    assert iterations == [0, 2, 4]
    assert (result.heldout_before, result.heldout_after) == (values[0], values[-1])
    assert result.checkpoint == result.folder / "checkpoints" / "step_00000004"
    assert result.model == result.folder / "pipeline"
    written = result.checkpoint.stat().st_mtime_ns
    assert verst.train(recipe, quiet=True) == result == verst.Result.of(result.folder)
    assert result.checkpoint.stat().st_mtime_ns == written

    async def whole() -> list[verst.Event]:
        return [event async for event in verst.events(recipe)]

    events = asyncio.run(whole())
    assert kinds(events) == WHOLE_SFT
    shown = events[0]
    assert isinstance(shown, verst.HeldOutSampled)
    assert shown.grid.exists()
    assert [picture.exists() for picture in shown.pictures] == [True, True]
    assert [sample["prompt"] for sample in shown.samples] == ["a yellow bus", "a big dog"]

    anew = verst.train(recipe.model_copy(update={"run": recipe.run.model_copy(update={"iterations": 1})}), resume=False)
    assert (anew.iterations, anew.folder) == (1, result.folder)
    assert verst.Result.of(result.folder.with_name("sft-1")).iterations == 4


def test_events_read_a_file_again_only_when_it_has_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = sft_recipe(tmp_path)
    verst.train(recipe, quiet=True)
    folder, reads = verst.Result.of(tmp_path / "runs" / "sft").folder, []
    read = api_events.read_metrics
    monkeypatch.setattr(api_events, "read_metrics", lambda path: reads.append(path) or read(path))
    news = api_events._News(folder)
    assert [news.complete(), news.complete()] == [True, True]
    assert (len(news.read()), news.read(), len(reads)) == (10, [], 1)
    with MetricsLog(folder / "metrics.jsonl") as log:
        log.append(5, {"x": 1.0})
    (row,) = news.read()
    assert (row.iteration, len(reads)) == (5, 2)
    (folder / "summary.json").unlink()
    assert not news.complete()


@on_a_loop
async def test_a_stream_that_is_left_stops_with_a_checkpoint_and_goes_on(tmp_path: Path) -> None:
    recipe = sft_recipe(tmp_path, iterations=500)
    async with contextlib.aclosing(verst.stream(recipe)) as events:
        async for event in events:
            if isinstance(event, verst.IterationDone) and event.iteration >= 1:
                break
    stopped = await asyncio.to_thread(verst.Result.of, tmp_path / "runs" / "sft")
    assert not stopped.complete
    assert 1 <= stopped.iterations < 500
    assert stopped.checkpoint is not None
    assert int(stopped.checkpoint.name.removeprefix("step_")) == stopped.iterations
    assert stopped.model is None

    more = sft_recipe(tmp_path, iterations=stopped.iterations + 1)
    seen = [event async for event in verst.stream(more)]
    ended = seen[-1]
    assert isinstance(ended, verst.RunEnded)
    assert ended.result.complete
    rows = [event.iteration for event in seen if isinstance(event, verst.IterationDone)]
    assert rows == list(range(stopped.iterations + 2))


@on_a_loop
async def test_what_ends_a_run_is_raised_from_its_stream(tmp_path: Path) -> None:
    recipe = sft_recipe(tmp_path)
    missing = recipe.model_copy(
        update={"prompts": recipe.prompts.model_copy(update={"heldout": tmp_path / "none.txt"})}
    )
    with pytest.raises(ConfigError, match=r"prompts\.heldout = .*none\.txt' does not exist"):
        [event async for event in verst.stream(missing)]
    with pytest.raises(ConfigError, match=r"is no run folder"):
        [event async for event in verst.events(tmp_path / "nothing")]
    unmet = verst.Recipe.load({**recipe.model_dump(mode="json", exclude_none=True), "stop": {"reward_at_least": 99.0}})
    with pytest.raises(InvariantError, match=r"never reached stop\.reward_at_least"):
        [event async for event in verst.stream(unmet)]


PROGRAM = """
import asyncio, sys
import run_rewards, verst

async def main():
    recipe = verst.Recipe.load(sys.argv[1], "run.iterations=1")
    events = [event async for event in verst.stream(recipe, rewards={"trend": run_rewards.bright})]
    print(*(f"{type(event).__name__}-{event.iteration}" for event in events))
    print(events[-1].result.complete, events[-1].result.folder, events[3].metrics["reward/trend/mean"])

asyncio.run(main())
"""


@pytest.mark.ray
def test_an_rl_run_beside_an_event_loop_with_a_reward_of_ones_own(tmp_path: Path) -> None:
    # In a process of its own: Ray forks, and a process that has run a thousand tests has threads.
    (tmp_path / "program.py").write_text(PROGRAM)
    tests = str(Path(__file__).parent)
    done = subprocess.run(
        [sys.executable, tmp_path / "program.py", write_recipe(tmp_path)],
        capture_output=True,
        text=True,
        timeout=300,
        cwd=tests,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([tests, *sys.path])},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    told, result = done.stdout.strip().splitlines()[-2:]
    assert told.split() == [
        "HeldOutSampled-0",
        "IterationDone-0",
        "HeldOutSampled-1",
        "IterationDone-1",
        "CheckpointSaved-1",
        "RunEnded-1",
    ]
    complete, folder, reward = result.split()
    assert complete == "True"
    assert 0 < float(reward) < 1
    assert 'path = "run_rewards:bright"' in (tmp_path / folder / "recipe.toml").read_text()


# ------------------------------------------------------------------------------------------------- before and after a run


def test_a_plan_is_a_record(tmp_path: Path) -> None:
    recipe = recipe_with(tmp_path)
    light = verst.plan(recipe)
    assert light.batch is not None
    # 2 prompts x 4 samples, two of four steps trained; 8 pairs an optimizer step and rank in tiles of 2.
    assert (light.batch.samples, light.batch.microgroups, light.batch.pairs, light.batch.exact_ratio) == (
        8,
        4,
        16,
        True,
    )
    assert [(p.role, p.count) for p in light.processes][:3] == [("engine", 1), ("trainer", 1), ("parser", 1)]
    assert (light.recipe, light.steps, light.memory) == (recipe, None, None)
    whole = verst.plan(recipe, steps=True, memory=True)
    assert whole.steps is not None
    assert whole.memory is not None
    (visual,) = whole.steps.values()
    assert (len(visual.rows), visual.rows[0].sigma) == (4, 1.0)
    assert (visual.low, visual.high) == (0, 3)
    assert whole.memory.trainer_peak_bytes >= sum(i.bytes for i in whole.memory.trainer if i.phase == "always") > 0
    supervised = verst.plan(sft_recipe(tmp_path))
    assert (supervised.batch, supervised.processes) == (None, ())
    own = verst.plan(sft_recipe(tmp_path), memory=True).memory
    assert own is not None
    assert (own.trainer_peak_bytes > 0, own.engine) == (True, [])
    with pytest.raises(ConfigError, match=r"steps need sampling\.height and sampling\.width"):
        verst.plan(recipe_with(tmp_path, "sampling={num_steps=4}"), steps=True)


def test_a_simulation_is_a_record(tmp_path: Path) -> None:
    recipe = recipe_with(tmp_path)
    times = {"generate_s": 3.0, "train_s": 8.0, "sync_s": 1.0, "rewards": {"jpeg_size": {"sample_s": 0.0}}}
    found = verst.simulate(recipe, times=times, gpus=[1, 2])
    # One engine makes 4 microgroups one after the other; twice as many GPUs, in turns, take half the time.
    assert found.result.step_s == pytest.approx(4 * 3.0 + 8.0 + 1.0)
    assert [(size.gpus, size.counts.engines, size.counts.trainer_ranks) for size in found.sizes] == [
        (1, 1, 1),
        (2, 2, 2),
    ]
    assert found.sizes[1].result.step_s == pytest.approx(2 * 3.0 + 4.0 + 1.0)
    for given, says in (
        ({}, "--from RUN, a run that was measured, or --times FILE"),
        ({"times": times, "run": tmp_path}, "not both"),
        ({"times": times, "gpus": [0]}, "must be numbers from 1"),
        ({"run": tmp_path}, "no spans of a rollout"),
        ({"times": {**times, "rewards": {}}}, "rewards jpeg_size are not known, only of: none"),
        ({"times": {**times, "sync": 1.0}}, "sync.*did you mean 'sync_s'"),
    ):
        with pytest.raises(ConfigError, match=says):
            verst.simulate(recipe, **given)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run folder with checkpoints of two iterations, the first of them the best, made without Ray."""
    folder = tmp_path_factory.mktemp("run")
    recipe = recipe_with(folder, LORA, "trainer.lr=1e-2", "checkpoint.keep_best=true")
    made = RunFolder(recipe)
    with one_rank(recipe) as trainer:
        for iteration in (1, 2):
            trainer.update(shares_of(recipe, rollout=iteration)[0])
            trainer.save(made.checkpoints, iteration)
            publish(made.checkpoints, iteration, {"iteration": iteration}, keep=2, best=1)
    made.close()
    return made.path


def test_checkpoints_are_listed_and_exported(run: Path, tmp_path: Path) -> None:
    assert [(c.iteration, c.folder.name, c.best) for c in verst.checkpoints(run)] == [
        (1, "step_00000001", True),
        (2, "step_00000002", False),
    ]
    lora = verst.export(run, tmp_path / "lora", checkpoint="best")
    assert (lora.folder, lora.what, lora.checkpoint.name) == (tmp_path / "lora", "lora", "step_00000001")
    assert (lora.folder / "pytorch_lora_weights.safetensors").exists()
    pipeline = verst.export(run, str(tmp_path / "model"), what="pipeline", checkpoint=2)
    assert (pipeline.what, pipeline.checkpoint.name) == ("pipeline", "step_00000002")
    with (
        verst.Engine(pipeline.folder, device="cpu") as merged,
        verst.Engine(run, checkpoint=2, device="cpu") as attached,
    ):
        one, two = (e.generate("a cat", seed=1, guidance_scale=2.0, **SMALL)[0].media.int() for e in (merged, attached))
    assert int((one - two).abs().max()) <= 1  # a merged and an attached LoRA, in 8 bits
    for call, says in (
        (lambda: verst.export(run, tmp_path / "lora"), "exists already"),
        (
            lambda: verst.export(run, tmp_path / "new", checkpoint=7),
            r"no checkpoint of iteration 7; iterations saved: 1, 2",
        ),
        (lambda: verst.export(run, tmp_path / "new", ema=True), r"trainer\.ema_decay is unset"),
        (lambda: verst.export(run, tmp_path / "new", what="all"), "what = 'all': valid: auto, lora, pipeline"),  # type: ignore[arg-type]
        (lambda: verst.export(tmp_path, tmp_path / "new"), "is no run folder"),
        (lambda: verst.checkpoints(tmp_path), "is no run folder"),
    ):
        with pytest.raises(ConfigError, match=says):
            call()
    assert not (tmp_path / "new").exists()


def test_runs_and_recipes_are_evaluated(run: Path, tmp_path: Path) -> None:
    newest = verst.evaluate(run)
    assert newest.checkpoint == verst.checkpoints(run)[-1].folder
    assert newest.metrics.keys() == {"reward/heldout", "reward/heldout/jpeg_size"}
    recipe = verst.Recipe.load(run / "recipe.toml")
    before = verst.evaluate(recipe)
    assert before.checkpoint is None
    assert before.metrics != newest.metrics != verst.evaluate(run, checkpoint="best").metrics
    for call, says in (
        (lambda: verst.evaluate(recipe, checkpoint=1), "checkpoint = 1: run is a recipe, whose untrained model"),
        (lambda: verst.evaluate(recipe, ema=True), "ema: run is a recipe, whose untrained model"),
        (lambda: verst.evaluate(sft_recipe(tmp_path)), "is an SFT recipe, which evaluates itself"),
        (lambda: verst.evaluate(tmp_path), "is no run folder"),
    ):
        with pytest.raises(ConfigError, match=says):
            call()


def test_what_a_run_does_not_have_is_named(run: Path, tmp_path: Path) -> None:
    for call, says in (
        (lambda: verst.triage(run), r"spans\.jsonl is missing or holds no spans"),
        (lambda: verst.trace(run), r"spans\.jsonl is missing or holds no spans"),
        (lambda: verst.replay(run), r"has not made iteration 2"),
        (lambda: verst.explain_ratio(run, 9, 0, 0), r"iteration 9 is not among 1\.\.3"),
        (lambda: verst.write_page(tmp_path, tmp_path / "page.html"), "is no run folder and has none in it"),
    ):
        with pytest.raises(ConfigError, match=says):
            call()


# ------------------------------------------------------------------------------------------------- engine and trainer


@pytest.fixture(scope="module")
def engine() -> verst.Engine:
    return verst.Engine(tiny_model(), device="cpu")


SMALL = {"height": 32, "width": 32, "num_inference_steps": 3, "max_sequence_length": 16}


def test_an_engine_makes_pictures_and_trajectories(engine: verst.Engine) -> None:
    first, second = engine.generate(["a cat", "a dog"], seed=5, **SMALL)
    assert (first.prompt, first.seed, second.seed, first.streams) == ("a cat", 5, 6, {})
    assert first.media.shape == (1, 32, 32, 3)
    assert verst.picture(first).size == (32, 32)
    assert np.array_equal(np.asarray(verst.picture(first)), first.media[0].numpy())
    (path,) = [sample.streams["visual"] for sample in engine.generate("a cat", rollout=True, **SMALL)]
    assert path.latents.shape[0] == path.sigmas.shape[0] == 4
    assert path.log_probs.shape == (3,)
    assert path.log_probs.isfinite().all()
    assert path.log_probs.all()


def test_samples_are_saved_as_what_they_are(engine: verst.Engine, tmp_path: Path) -> None:
    (sample,) = engine.generate("a cat", **SMALL)
    path = verst.save(sample, tmp_path / "new" / "cat")
    assert path == tmp_path / "new" / "cat.png"
    with Image.open(path) as saved:
        assert np.array_equal(np.asarray(saved), sample.media[0].numpy())
    clip = dataclasses.replace(
        sample, media=sample.media.repeat(5, 1, 1, 1), fps=4.0, audio=torch.zeros(2, 8000), sample_rate=8000
    )
    path = verst.save(clip, str(tmp_path / "clip.1"))
    assert path == tmp_path / "clip.1.webm"
    with av.open(str(path)) as read:
        assert sum(1 for _ in read.decode(video=0)) == 5
        assert len(read.streams.audio) == 1


def test_wrong_requests_of_an_engine_are_named(engine: verst.Engine, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"hight is no field of the request; did you mean 'height'"):
        engine.generate("a cat", hight=32)
    with pytest.raises(RequestError, match="prompts is empty"):
        engine.generate([])
    with pytest.raises(SyncError, match=r"holds no \*\.safetensors"):
        engine.load_weights(tmp_path)
    with pytest.raises(ConfigError, match=r"dtype = 'fp8': valid: float32, bfloat16, float16"):
        verst.Engine(tiny_model(), dtype="fp8")
    with pytest.raises(ConfigError, match="does not exist; name a model folder or a run folder"):
        verst.Engine(tmp_path / "none")


def test_an_engine_takes_weights_from_a_folder(tmp_path: Path) -> None:
    with verst.Engine(tiny_model(), device="cpu") as engine:
        name, before = next(iter(engine.worker.components.transformer.state_dict().items()))
        saved = before.clone()
        assert engine.load_weights({name: saved + 1}) == 0
        assert torch.equal(engine.worker.components.transformer.state_dict()[name], saved + 1)
        assert engine.load_weights(tiny_model()) == 1
        assert torch.equal(engine.worker.components.transformer.state_dict()[name], saved)


def test_a_loop_of_ones_own(tmp_path: Path) -> None:
    recipe = recipe_with(tmp_path)
    with verst.Engine(recipe.model.path, device="cpu") as engine, verst.Trainer(recipe) as trainer:
        assert trainer.publish(engine) == engine.weight_version == 0
        before = trainer.weights()
        groups = trainer.sample(engine)
        assert [(g.rollout, g.index, len(g.samples)) for g in groups] == [(0, 0, 4), (0, 1, 4)]
        metrics = trainer.update(groups)
        # What is trained was sampled by the same weights: before the update the ratio is 1.
        assert metrics["policy/ratio_max_deviation"] == 0
        assert metrics["rollout/samples"] == 8
        after = trainer.weights()
        assert any(not torch.equal(after[name], value) for name, value in before.items())
        assert trainer.publish(engine) == engine.weight_version == 1
        assert trainer.sample(engine)[0].rollout == 1


def test_recipes_that_a_trainer_does_not_take_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"verst\.Trainer takes a recipe of RL.*use verst\.train"):
        verst.Trainer(sft_recipe(tmp_path))
    with pytest.raises(ConfigError, match=r"trainer\.ranks = 2: verst\.Trainer is one rank"):
        verst.Trainer(recipe_with(tmp_path, "trainer.ranks=2"))
