"""An RL run, top to bottom.

    prompts ─> rollout (engines, parsers, rewards) ─> advantages, pairs ─> trainer ─> weight sync ─> engines

Iteration i begins rollout i - 1 + k with weight version i - 1, trains that version on rollout i - 1, and hands version i to
the engines as soon as they are done; k is the schedule's staleness: 0 takes turns, more works side by side. A checkpoint
of iteration i is taken after that, so that a resumed run repeats nothing and skips nothing.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch

from verst.cluster.cluster import Cluster
from verst.config.plan import num_gpus
from verst.config.recipe import RlRecipe, gold_names
from verst.errors import StateLost
from verst.loops.batch import Batch, make_batch, reward_weights
from verst.loops.checkpoints import Checkpoints
from verst.loops.ledger import ledger_row
from verst.loops.own_code import check_own_code
from verst.loops.prompt_checks import ask_engine, check_prompts
from verst.loops.report import HELDOUT, Report
from verst.loops.run_folder import RunFolder, dump
from verst.loops.shown import heldout_samples, seen_groups
from verst.loops.stop import Asked, Interrupted, StopSignal
from verst.loops.watch import Watch, gold_metrics
from verst.obs.machine import DriverLoad
from verst.obs.metrics import mean_of_finite, read_metrics
from verst.obs.spans import DRIVER, TRAINER, lane_of
from verst.rollout.ahead import Ahead
from verst.rollout.filters import GroupFilters, has_zero_variance, weighted_sums
from verst.rollout.pipeline import Pipeline, ScoredMicrogroup, in_prompt_order
from verst.rollout.plan import plan_evaluation
from verst.rollout.prompts import Prompt, PromptSource, read_prompts
from verst.rollout.sampler import Rollout, Sampler
from verst.trainer import checkpoint
from verst.trainer.rl import UpdateMetrics
from verst.types import Group, Microgroup


async def train_rl(
    recipe: RlRecipe, folder: RunFolder, *, quiet: bool = False, until: int | None = None, asked: Asked | None = None
) -> None:
    """Run to the end, or to a checkpoint on Ctrl-C. The same call on the same folder goes on where it stopped.

    until: stop, with a checkpoint, after this iteration, as if interrupted there. asked: see StopSignal.
    """
    report = Report(recipe, folder, quiet=quiet)
    try:
        source = PromptSource(recipe.prompts.train, seed=recipe.run.seed, shuffle=recipe.prompts.shuffle)
        heldout = read_prompts(recipe.prompts.heldout)[: recipe.eval.num_prompts]
        check_prompts(recipe, source.prompts, heldout)
        check_own_code(recipe)
        filters = GroupFilters(recipe)
        saved = resume_point(folder)
        report.status("starting Ray, engine and trainer")
        with StopSignal(asked) as stop:
            cluster = Cluster(
                recipe,
                cuda=wants_cuda(recipe),
                spans=report.spans,
                on_event=report.supervision,
                on_processes=folder.write_processes,
            )
            async with cluster:
                while True:
                    run = Run(recipe, folder, report, cluster, source, heldout, filters)
                    lost = await run.ends(stop, saved, until)
                    if lost is None:
                        break
                    report.status("going on from the newest checkpoint")
                    await cluster.restart_trainer(lost)
                    checkpoint.sweep(folder.checkpoints)
                    saved = resume_point(folder)
    finally:
        report.close()


class Run:
    """The state of one driver: where the run stands, and the pipeline that it samples with."""

    def __init__(
        self,
        recipe: RlRecipe,
        folder: RunFolder,
        report: Report,
        cluster: Cluster,
        source: PromptSource,
        heldout: list[Prompt],
        filters: GroupFilters,
    ) -> None:
        self._recipe = recipe
        self._folder = folder
        self._report = report
        self._cluster = cluster
        self._source = source
        self._heldout = heldout
        self._checkpoints = Checkpoints(folder.checkpoints, cluster.trainer, recipe.checkpoint)
        self._watch = Watch(recipe, score_gold=cluster.score_gold)
        self._load = DriverLoad()
        self._spans = report.spans
        engines = cluster.engines
        stages: dict[str, Any] = {"generate": engines.generate, "parse": cluster.parse, "check": engines.check}
        self._staleness = recipe.schedule.staleness
        keep = self._staleness > 0 or recipe.rollout.dynamic.staleness > 0
        pipeline = Pipeline(**stages, score=cluster.score, spans=report.spans, keep_answers=keep)
        self._ahead = Ahead(recipe, Sampler(recipe, source, pipeline, filters, spans=report.spans))
        self._evaluation = Pipeline(**stages, score=cluster.score_all, spans=report.spans)

    async def ends(self, stop: StopSignal, saved: Mapping[str, Any] | None, until: int | None) -> StateLost | None:
        """`to_the_end`, and closed; how its state was lost, where another may go on from the newest checkpoint."""
        try:
            await self.to_the_end(stop, saved, until)
            return None
        except StateLost as lost:
            if not self._recipe.supervision.enabled:
                raise
            self._report.notice(str(lost))
            return lost
        finally:
            await self.close()

    async def to_the_end(self, stop: StopSignal, saved: Mapping[str, Any] | None, until: int | None = None) -> None:
        """saved: the run state of the newest checkpoint; None for a new run."""
        recipe = self._recipe
        self._load.start()
        self._report.status(self._cluster.sync_choice)
        for choice in dict.fromkeys(self._cluster.transports):
            self._report.status(f"samples by {choice}")
        await ask_engine(recipe, self._cluster.engines, self._source.prompts, self._heldout)
        if not recipe.decodes_heldout:
            self._report.notice(
                "all rewards are of latents: nothing is decoded or shown; set eval.grid to see held-out pictures"
            )
        done = await self._resume(saved)
        await self._sync(done)
        ended = await self._complete(0, {}) if saved is None else None
        for iteration in range(done + 1, (until or recipe.run.iterations) + 1):
            if ended or stop.requested:
                break
            await self._checkpoints.poll()
            try:
                with self._phase("iteration", iteration):
                    metrics = await self._iterate(iteration, stop)
                    done = iteration
                    ended = await self._complete(done, metrics)
            except Interrupted:
                break
        await self._end(done, ended)

    async def _iterate(self, iteration: int, stop: StopSignal) -> dict[str, float]:
        """Up to the hand-off of the new weights. Raises Interrupted, before any of them, when the run is to stop."""
        recipe, started = self._recipe, time.perf_counter()
        through = min(iteration - 1 + self._staleness, recipe.run.iterations - 1)
        self._ahead.begin(through, weight_version=iteration - 1)
        with self._phase("wait", iteration):
            rollout = await stop.unless_stopped(self._ahead.take(iteration - 1))
        with self._phase("advantages", iteration):
            batch = make_batch(recipe, rollout.groups, rollout.dropped_by)
        wait_s = time.perf_counter() - started
        (update, train_s), seen = await asyncio.gather(self._update(batch, iteration), self._look(iteration, rollout))
        with self._phase("drain", iteration):
            await self._ahead.drained()
        sync, sync_s = await self._sync(iteration)
        self._report.trained(ledger_row(recipe, iteration, rollout, batch))
        return {
            **reward_metrics(recipe, rollout.groups, batch),
            **rollout.metrics,
            **seen,
            **update_metrics(update, batch, recipe),
            **sync,
            **self._cluster.reward_metrics(),
            **self._cluster.supervision_metrics(),
            **self._cluster.engines.metrics(),
            **self._load.metrics(),
            **self._spans.metrics(),
            **perf_metrics(recipe, rollout, longest_s=self._spans.longest_stage_s(iteration - 1)),
            "perf/wait_s": wait_s,
            "perf/train_s": train_s,
            "perf/step_s": wait_s + train_s,
            "perf/sync_s": sync_s,
            **(self._ahead.waits() if self._staleness else {}),
            "perf/iteration_s": time.perf_counter() - started,
        }

    def _phase(self, name: str, iteration: int) -> AbstractContextManager[None]:
        """Takes down a span of the driver."""
        return self._spans.span(name, lane=lane_of(DRIVER, 0), iteration=iteration)

    async def _complete(self, done: int, metrics: dict[str, float]) -> str | None:
        """Evaluate, judge, report and save what is due after iteration `done`; why the run ends here, if it does."""
        recipe, last = self._recipe, done == self._recipe.run.iterations
        if done % recipe.eval.every == 0 or last:
            with self._phase("evaluate", done):
                metrics |= await self._evaluate(done)
        verdict = self._watch.after(done, metrics)
        if verdict.rollback_to is not None:
            await self._roll_back(verdict.rollback_to, version=done)
        self._report.iteration(done, metrics | verdict.metrics)
        self._report.alarms(done, verdict.raised)
        due = done > 0 and done % recipe.checkpoint.every == 0
        if due or last or verdict.is_best or verdict.stop or verdict.rollback_to is not None:
            with self._phase("checkpoint", done):
                await self._save(done)
        return verdict.stop

    async def _roll_back(self, iteration: int, *, version: int) -> None:
        """Weights, optimizer and averages of an earlier iteration, into engines too; the run's numbers go on.

        Groups that were kept or sampled ahead are of weights that are gone.
        """
        await self._checkpoints.finish()
        folder = checkpoint.step_folder(self._folder.checkpoints, iteration)
        dropped = await self._ahead.forget()
        self._report.status(f"rolling back to {folder}; {dropped} groups of the weights before are dropped")
        checkpoint.read_state(folder)
        await self._cluster.trainer.load(folder)
        await self._cluster.trainer.scale_lr(self._watch.lr_scale)
        await self._sync(version)

    async def _resume(self, saved: Mapping[str, Any] | None) -> int:
        """Load the newest checkpoint into trainer and sampler; the iteration at which the run then stands."""
        done = None if saved is None else int(saved["iteration"])
        if saved is not None and done is not None:
            latest = checkpoint.step_folder(self._folder.checkpoints, done)
            self._report.status(f"loading {latest}")
            await self._cluster.trainer.load(latest)
            await self._ahead.restore(saved, latest, self._cluster.parse)
        self._report.resume_at(-1 if done is None else done)
        kept = [checkpoint.iteration_of(folder) for folder in checkpoint.published(self._folder.checkpoints)]
        self._watch.resume(read_metrics(self._folder.metrics), kept)
        await self._cluster.trainer.scale_lr(self._watch.lr_scale)
        return done or 0

    async def _update(self, batch: Batch, iteration: int) -> tuple[UpdateMetrics | None, float]:
        """The optimizer steps of one rollout; None where no sample has anything to teach."""
        started = time.perf_counter()
        with self._spans.span("train", lane=lane_of(TRAINER, 0), iteration=iteration, pairs=batch.num_pairs):
            update = await self._cluster.update(batch.shares) if batch.num_steps else None
        return update, time.perf_counter() - started

    async def _look(self, iteration: int, rollout: Rollout) -> dict[str, float]:
        """What a rollout looks like: kept for people, and as metrics. Runs beside the update."""
        groups = seen_groups(self._recipe, rollout.groups, rollout.dropped_by)
        await asyncio.to_thread(self._report.groups, iteration, groups)
        return await self._watch.observe(iteration, rollout.groups, rollout.scored)

    async def _sync(self, version: int, *, ema: bool = False) -> tuple[dict[str, float], float]:
        """The trainer's weights into every engine, with certificates."""
        started = time.perf_counter()
        with self._phase("sync", version):
            manifest = await self._cluster.sync(version, ema=ema)
        metrics = {
            "sync/tensors": float(sum(len(bucket["tensors"]) for bucket in manifest["buckets"])),
            "sync/bytes": float(sum(bucket["nbytes"] for bucket in manifest["buckets"])),
        }
        return metrics, time.perf_counter() - started

    async def _evaluate(self, iteration: int) -> dict[str, float]:
        """Held-out reward by deterministic sampling from fixed noise, and its pictures."""
        recipe = self._recipe
        self._report.status(f"evaluating {len(self._heldout)} held-out prompts")
        if recipe.eval.weights == "ema":
            await self._sync(iteration, ema=True)
        tasks = plan_evaluation(recipe, self._heldout)
        scored, seconds = await self._evaluation.run(tasks, weight_version=iteration)
        if recipe.eval.weights == "ema":
            await self._sync(iteration)
        if recipe.decodes_heldout:
            samples = heldout_samples(recipe, self._heldout, scored)
            await asyncio.to_thread(self._report.heldout, iteration, samples)
        return heldout_metrics(recipe, scored) | {"perf/eval_s": seconds.total}

    async def _save(self, iteration: int) -> None:
        self._report.status(f"saving checkpoint of iteration {iteration}")
        await self._ahead.settle(below=iteration + self._staleness)
        state = {"iteration": iteration, "weight_version": iteration, "recipe": dump(self._recipe)}
        state["sampler"] = self._ahead.state()
        await self._checkpoints.save(iteration, state, best=self._watch.best, files=self._ahead.files())

    async def close(self) -> None:
        """No rollout and no publishing of a checkpoint goes on after this."""
        self._load.stop()
        await self._ahead.close()
        await self._checkpoints.close()

    async def _end(self, done: int, ended: str | None) -> None:
        """ended: why the watch ended the run."""
        await self._checkpoints.finish()
        if done < self._recipe.run.iterations and ended is None:
            latest = self._folder.latest()
            if done and (latest is None or latest != checkpoint.step_folder(self._folder.checkpoints, done)):
                await self._save(done)
                await self._checkpoints.finish()
            self._report.status(f"stopped after iteration {done}; the same command goes on from there")
            return
        self._report.finish(done, early=done < self._recipe.run.iterations, why=ended)


def resume_point(folder: RunFolder) -> dict[str, Any] | None:
    """The run state of the newest checkpoint, every file of it verified before any process starts; None without one."""
    latest = folder.latest()
    return None if latest is None else checkpoint.read_state(latest)


def wants_cuda(recipe: RlRecipe) -> bool:
    return recipe.run.device == "cuda" or (recipe.run.device == "auto" and torch.cuda.is_available())


def reward_metrics(recipe: RlRecipe, groups: Sequence[Group], batch: Batch) -> dict[str, float]:
    """Of the training samples of one rollout; masked ones count in no mean."""
    weights = reward_weights(recipe)
    scores = [group.rewards() for group in groups]
    metrics = {
        f"reward/{name}/mean": mean_of_finite([v for by_name in scores for v in by_name.get(name, ())])
        for name in weights
    }
    total = np.array([v for by_name in scores for v in weighted_sums(by_name, weights)])
    finite = total[np.isfinite(total)]
    return metrics | {
        "reward/train_mean": mean_of_finite(total),
        "reward/train_std": float(finite.std()) if len(finite) else float("nan"),
        "reward/num_masked": float(batch.advantages.num_masked),
        "reward/num_failures": float(sum(scores.num_failures for group in groups for scores in group.scores)),
        "rollout/groups": float(len(groups)),
        "rollout/samples": float(len(total)),
        "rollout/zero_variance_groups": float(sum(has_zero_variance(g.rewards(), weights) for g in groups)),
        **truncation("rollout", recipe, (max(map(num_truncated, group.microgroups)) for group in groups)),
    }


def num_truncated(microgroup: Microgroup) -> int:
    """Distinct prompts of one request, its negative one included, that an encoder cut."""
    return int(microgroup.echo["truncated_prompts"])


def truncation(kind: str, recipe: RlRecipe, counts: Iterable[int]) -> dict[str, float]:
    """Cut prompts, where the recipe allows it: else there are none."""
    return {f"{kind}/truncated_prompts": float(sum(counts))} if recipe.model.long_prompts == "truncate" else {}


def update_metrics(update: UpdateMetrics | None, batch: Batch, recipe: RlRecipe) -> dict[str, float]:
    skipped = {"train/skipped_steps": float(recipe.trainer.steps_per_rollout - batch.num_steps)}
    if update is None:
        return skipped
    norm = {} if update.grad_norm is None else {"train/grad_norm": update.grad_norm}
    return skipped | {
        "train/loss": update.loss,
        **norm,
        **{f"train/{name}": value for name, value in update.scaling.items()},
        "train/lr": update.lr,
        "train/pairs": float(batch.num_pairs),
        **{f"policy/{name}": value for name, value in update.policy.items()},
    }


def perf_metrics(recipe: RlRecipe, rollout: Rollout, *, longest_s: float) -> dict[str, float]:
    """generate and reward overlap: rollout is their wall time, the rest of it after the last generation is reward's.

    longest_s: what the slowest stage needs by itself; 0: not known, for a rollout of another process.
    """
    seconds = rollout.seconds
    samples_per_s = rollout.metrics["rollout/groups_sampled"] * recipe.rollout.group_size / seconds.total
    per_gpu = {"perf/samples_per_gpu_s": samples_per_s / num_gpus(recipe)} if wants_cuda(recipe) else {}
    overlap = {"perf/overlap_efficiency": longest_s / seconds.total} if longest_s else {}
    return {
        "perf/rollout_s": seconds.total,
        "perf/generate_s": seconds.last_generated,
        "perf/reward_s": seconds.total - seconds.last_generated,
        "perf/samples_per_s": samples_per_s,
        **per_gpu,
        **overlap,
    }


def heldout_metrics(recipe: RlRecipe, scored: list[ScoredMicrogroup]) -> dict[str, float]:
    """Of one evaluation: means over prompts of the trained and gold rewards."""
    values = heldout_rewards(recipe, scored)
    named = {f"{HELDOUT}/{name}": mean_of_finite(v) for name, v in values.items() if name != "total"}
    gold = gold_metrics(gold_names(recipe), [item.scores for item in scored])
    cut = truncation("eval", recipe, (num_truncated(item.microgroup) for item in scored))
    return {HELDOUT: mean_of_finite(values["total"]), **named, **gold, **cut}


def heldout_rewards(recipe: RlRecipe, scored: list[ScoredMicrogroup]) -> dict[str, list[float]]:
    """reward name -> the values of the prompts it applies to; "total", the weighted sum of those -> one a prompt."""
    weights = reward_weights(recipe)
    by_name = {name: [v for item in scored for v in item.scores.by_reward.get(name, ())] for name in weights}
    total = [v for item in scored for v in weighted_sums(item.scores.by_reward, weights)]
    return {**{name: values for name, values in by_name.items() if values}, "total": in_prompt_order(scored, total)}
