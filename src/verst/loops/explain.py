"""Why is a ratio not 1? One sample of a run, made again by the engine's code and scored again by the trainer's, block by
block: the first module whose output differs is where the two part.

The sample is made from its plan and from the checkpoint of the weights that made it: nothing but those two decides it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from verst.algorithms.pairs import Tile, joint_log_prob, pair_block, tiles_of
from verst.config.recipe import RlRecipe
from verst.config.sections import NoSteps, ParallelConfig, SglangEngine
from verst.engine.resolve import resolve
from verst.engine.wire import encode_response, to_microgroup
from verst.engine.worker import Worker
from verst.errors import ConfigError
from verst.flow.controller import make_transition
from verst.flow.determinism import make_deterministic
from verst.loops.local_engine import sync_in_process
from verst.loops.matrix import one_rank
from verst.loops.rl import wants_cuda
from verst.loops.run_folder import stored_rl_recipe
from verst.obs.alarms import ROLLED_BACK_TO
from verst.obs.metrics import read_metrics
from verst.obs.waiting import Tell, nobody
from verst.rollout.ahead import position_of, version_of
from verst.rollout.plan import MicrogroupTask, plan_group
from verst.rollout.prompts import PromptSource
from verst.trainer.checkpoint import read_state
from verst.trainer.export import find_checkpoint
from verst.trainer.forward import Forward
from verst.trainer.policies import step_distribution
from verst.trainer.rl import DTYPES, RlTrainer
from verst.types import Microgroup
from verst.weights.lora import adaptable


@dataclass(frozen=True, kw_only=True)
class Difference:
    """One tensor that engine and trainer both made."""

    name: str
    """Module and, where it gives several tensors, which of them; `input ...` for what went into the transformer."""
    call: int
    """Which of the step's calls of the transformer (guidance may make two)."""
    largest: float
    """Largest absolute difference over the sample's microgroup; inf where shapes or dtypes differ."""
    engine: str
    """Shape and dtype."""
    trainer: str


@dataclass(frozen=True, kw_only=True)
class StepExplanation:
    """One trained step of the sample."""

    step: int
    sigma: float
    ratio: float
    log_prob_engine: float
    log_prob_trainer: float
    compared: int
    """Tensors that were compared."""
    differing: tuple[Difference, ...]
    """Those that differ, in the order in which they were made; the first is the cause."""


@dataclass(frozen=True, kw_only=True)
class Explanation:
    iteration: int
    group: int
    index: int
    prompt: str
    seed: int
    checkpoint: Path | None
    """None: the untrained model."""
    exact: bool
    """The recipe asks for tiles of the engine's geometry, in which the ratio is exactly 1."""
    steps: tuple[StepExplanation, ...]

    @property
    def first(self) -> Difference | None:
        return next((step.differing[0] for step in self.steps if step.differing), None)


def explain_ratio(
    run: Path,
    iteration: int,
    group: int,
    index: int,
    *,
    perturb: Callable[[nn.Module], None] | None = None,
    tell: Tell = nobody,
) -> Explanation:
    """Sample `index` of group `group` of `iteration` (from 1), by the weights that sampled it, in engine and trainer alike.

    perturb: changes the trainer's module first, for tests. Raises ConfigError where the run keeps no checkpoint of those
    weights, has no such sample, or trains no recorded steps.
    """
    recipe = stored_rl_recipe(run).model_copy(deep=True)
    alone = {"ranks": 1, "parallel": ParallelConfig()}
    recipe = recipe.model_copy(update={"trainer": recipe.trainer.model_copy(update=alone)})
    if isinstance(recipe.sampling.steps, NoSteps):
        raise ConfigError(
            f"{run} trains with {recipe.algorithm.type} on clean samples: no step is recorded, so none has a ratio"
        )
    if isinstance(recipe.engine, SglangEngine):
        raise ConfigError(
            f"{run} was sampled by SGLang servers (engine.type = sglang), into whose blocks nobody sees; docs/sglang.md says "
            "how near the ratio is to 1 there, and why"
        )
    if not 1 <= iteration <= recipe.run.iterations:
        raise ConfigError(f"iteration {iteration} is not among 1..{recipe.run.iterations} of this run")
    back = [int(row["iteration"]) for row in read_metrics(run / "metrics.jsonl") if ROLLED_BACK_TO in row]
    version = version_of(iteration - 1, staleness=recipe.schedule.staleness, rollbacks=back)
    checkpoint = None if version == 0 else find_checkpoint(run, str(version))
    task = _task_of(recipe, iteration, group, index, checkpoint)
    device = torch.device("cuda" if wants_cuda(recipe) else "cpu")
    if recipe.run.threads:
        torch.set_num_threads(recipe.run.threads)
    if recipe.run.deterministic:
        make_deterministic(device)
    model = recipe.model
    tell(f"loading {model.path} for engine and trainer")
    worker = Worker(
        model.path, dtype=DTYPES[model.dtype], fp32_modules=model.fp32_modules, device=device, compiled=model.compile
    )
    with one_rank(recipe, device=device) as trainer:
        if checkpoint is not None:
            trainer.load(checkpoint)
        sync_in_process(trainer, worker, version=version)
        if perturb is not None:
            perturb(trainer.transformer)
        tell("sampling again")
        microgroup = _generate(worker, task)
        tell("comparing engine and trainer, step by step")
        row = [key.index for key in task.keys].index(index)
        steps = tuple(
            _explain_step(recipe, worker, trainer, task, microgroup, row, tile, step)
            for tile, step in _tiles(recipe, microgroup, row, device)
        )
    return Explanation(
        iteration=iteration,
        group=group,
        index=index,
        prompt=task.prompts[row],
        seed=microgroup.samples[row].seed,
        checkpoint=checkpoint,
        exact=recipe.run.deterministic and recipe.trainer.tile_size == recipe.rollout.microgroup_size,
        steps=steps,
    )


def _task_of(recipe: RlRecipe, iteration: int, group: int, index: int, checkpoint: Path | None) -> MicrogroupTask:
    """checkpoint: of the weights that sampled, which says where among the prompts the rollout began."""
    rollout = recipe.rollout
    groups = (rollout.dynamic.max_groups or 4 * rollout.num_groups) if rollout.dynamic.enabled else rollout.num_groups
    if not (0 <= group < groups and 0 <= index < rollout.group_size):
        raise ConfigError(
            f"iteration {iteration} has no sample {group}.{index}: groups are 0..{groups - 1}, samples "
            f"0..{rollout.group_size - 1}"
        )
    source = PromptSource(recipe.prompts.train, seed=recipe.run.seed, shuffle=recipe.prompts.shuffle)
    state = {"iteration": 0, "sampler": {"position": 0}} if checkpoint is None else read_state(checkpoint)
    first = position_of(recipe, state, iteration - 1)
    tasks = plan_group(recipe, source.at(first + group), rollout=iteration - 1, group=group)
    return tasks[index // rollout.microgroup_size]


def _generate(worker: Worker, task: MicrogroupTask, *, before_step: Callable[[], None] = lambda: None) -> Microgroup:
    """before_step is called ahead of each denoising step."""

    def stopped() -> bool:
        before_step()
        return False

    (records,) = worker.generate([resolve(task.request, worker.components)], stopped=stopped)
    if isinstance(records, Exception):
        raise records
    return to_microgroup(encode_response(records), task.keys)


def _tiles(recipe: RlRecipe, microgroup: Microgroup, row: int, device: torch.device) -> Iterator[tuple[Tile, int]]:
    """The tile that holds the sample, and its step, for each trained step; tiles as the trainer cuts them."""
    count = len(microgroup.samples)
    block = pair_block(microgroup, advantages=[0.0] * count, mask=[True] * count)
    size = min(recipe.trainer.tile_size, count)
    trajectory = next(iter(microgroup.samples[0].streams.values()))
    tiles = tiles_of([block], tile_size=size, device=device)
    per_step = len(tiles) // block.num_steps
    for position, step in enumerate(trajectory.sde_step_indices):
        yield tiles[position * per_step + row // size], step


def _explain_step(
    recipe: RlRecipe,
    worker: Worker,
    trainer: RlTrainer,
    task: MicrogroupTask,
    microgroup: Microgroup,
    row: int,
    tile: Tile,
    step: int,
) -> StepExplanation:
    rows = slice(row - row % len(tile.weight), row - row % len(tile.weight) + len(tile.weight))
    made = _Recorder()
    with made.of(worker.components.transformer):
        counter = -1

        def before_step() -> None:
            nonlocal counter
            counter += 1
            made.active = counter == step

        _generate(worker, task, before_step=before_step)
    seen = _Recorder(active=True)
    config = recipe.sampling
    with seen.of(trainer.transformer), torch.no_grad():
        distributions = step_distribution(
            trainer.transformer,
            tile,
            forward=Forward.of(
                config, trainer.family, DTYPES[recipe.model.dtype], two_passes=recipe.guides_in_two_passes
            ),
            transition=make_transition(config.transition.type, config.transition.eta),
        )
    place = row - rows.start
    new = sum(
        float(v[place]) for v in joint_log_prob(distributions, tile, reduction=config.log_prob_reduction).values()
    )
    old = sum(float(value[place]) for value in tile.old_log_probs.values())
    differing, compared = _compare(made.tensors, seen.tensors, rows, len(microgroup.samples))
    return StepExplanation(
        step=step,
        sigma=float(next(iter(tile.sigmas.values()))[place]),
        ratio=math.exp(new - old),
        log_prob_engine=old,
        log_prob_trainer=new,
        compared=compared,
        differing=tuple(differing),
    )


@dataclass
class _Recorder:
    """What the modules of a transformer put out while `active`, in the order in which they finish."""

    active: bool = False
    tensors: dict[tuple[int, str], Tensor] = field(default_factory=dict)
    """(call of the step, name) -> a copy on the CPU."""
    _calls: int = -1
    _times: Counter[str] = field(default_factory=Counter)

    @contextmanager
    def of(self, transformer: nn.Module) -> Iterator[None]:
        with ExitStack() as stack:
            for root in adaptable(transformer):
                prefix = next(name for name, module in transformer.named_modules() if module is root)
                handle = root.register_forward_pre_hook(self._enter(prefix), with_kwargs=True)
                stack.callback(handle.remove)
                for name, module in root.named_modules():
                    full = ".".join(part for part in (prefix, name) if part) or "transformer"
                    stack.callback(module.register_forward_hook(self._leave(full)).remove)
            yield

    def _enter(self, prefix: str) -> Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], None]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if self.active:
                self._calls += 1
                self._times.clear()
                named = {str(i): value for i, value in enumerate(args)} | kwargs
                for name, value in named.items():
                    self._keep(f"input {prefix + '.' if prefix else ''}{name}", value)

        return hook

    def _leave(self, name: str) -> Callable[[nn.Module, Any, Any], None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            if self.active:
                self._keep(name, output)

        return hook

    def _keep(self, name: str, value: Any) -> None:
        if isinstance(value, Tensor):
            # A module may be called several times in one call of the transformer.
            times = self._times[name]
            self._times[name] += 1
            self.tensors[self._calls, f"{name}#{times}" if times else name] = value.detach().to("cpu", copy=True)
        elif isinstance(value, Mapping):
            for key, inner in value.items():
                self._keep(f"{name}[{key}]", inner)
        elif isinstance(value, Sequence) and not isinstance(value, str):
            for key, inner in enumerate(value):
                self._keep(f"{name}[{key}]", inner)


def _compare(
    made: Mapping[tuple[int, str], Tensor], seen: Mapping[tuple[int, str], Tensor], rows: slice, count: int
) -> tuple[list[Difference], int]:
    """Differences in the engine's order, and how many tensors were compared. rows: the tile's, of the engine's `count`."""
    found = []
    for call, name in [*made, *(key for key in seen if key not in made)]:
        one, two = made.get((call, name)), seen.get((call, name))
        if one is not None and two is not None and one.shape != two.shape and len(one) % count == 0:
            # Guidance doubles the batch: each half holds the same rows.
            halves = one.unflatten(0, (len(one) // count, count))
            one = halves[:, rows].flatten(0, 1)
        largest = _largest(one, two)
        if largest > 0:
            found.append(
                Difference(name=name, call=call, largest=largest, engine=_describe(one), trainer=_describe(two))
            )
    return found, len(made.keys() & seen.keys())


def _largest(one: Tensor | None, two: Tensor | None) -> float:
    if one is None or two is None or one.shape != two.shape or one.dtype != two.dtype:
        return math.inf
    if one.numel() == 0 or torch.equal(one, two):
        return 0.0
    return float((one.double() - two.double()).abs().max()) if one.dtype != torch.bool else 1.0


def _describe(tensor: Tensor | None) -> str:
    if tensor is None:
        return "not made"
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
