"""`verst.Trainer`: the trainer of a run, of one rank in this process, for a loop of one's own."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType

import torch
from torch import Tensor

from verst.api.engine import Engine
from verst.api.running import wait_for
from verst.config import RlRecipe, SftRecipe
from verst.errors import ConfigError
from verst.loops.batch import make_batch
from verst.loops.local_engine import local_pipeline, sync_in_process
from verst.loops.prompt_checks import check_prompts
from verst.loops.rl import reward_metrics, update_metrics, wants_cuda
from verst.loops.start import with_files
from verst.rewards.local import local_pools
from verst.rollout.pipeline import assemble
from verst.rollout.plan import plan_rollout
from verst.rollout.prompts import PromptSource
from verst.rollout.scoring import Scorer
from verst.trainer.parallel import open_store
from verst.trainer.rl import RlTrainer
from verst.types import Group


class Trainer:
    """Samples with an `Engine`, updates, and hands weights over; a process has one at a time. Use it as a context manager,
    or close it."""

    def __init__(self, recipe: RlRecipe | SftRecipe) -> None:
        """Raises ConfigError for a recipe of SFT or of several ranks, or where files are missing; ModelError, PromptError
        or RewardError for files that cannot be used."""
        if isinstance(recipe, SftRecipe):
            raise ConfigError(
                "verst.Trainer takes a recipe of RL; algorithm.type = sft has no groups to train on: use verst.train"
            )
        if recipe.trainer.ranks != 1:
            raise ConfigError(
                f"trainer.ranks = {recipe.trainer.ranks}: verst.Trainer is one rank in this process; use 1, or verst.train"
            )
        found = with_files(recipe)
        assert isinstance(found, RlRecipe)
        self.recipe = recipe = found
        self._source = PromptSource(recipe.prompts.train, seed=recipe.run.seed, shuffle=recipe.prompts.shuffle)
        check_prompts(recipe, self._source.prompts, ())
        self._score = Scorer(recipe.rewards, local_pools(recipe.rewards), group_size=recipe.rollout.group_size)
        self._store = open_store("127.0.0.1", 0, rank=0, world_size=1)
        device = torch.device("cuda" if wants_cuda(recipe) else "cpu")
        self._trainer = RlTrainer(recipe, rank=0, world_size=1, store=self._store, device=device)
        self.version = 0
        """Updates done; the version under which `publish` hands the weights over."""

    def __enter__(self) -> Trainer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def sample(self, engine: Engine, rollout: int | None = None) -> list[Group]:
        """A rollout of the recipe: its prompts, seeds and steps, scored by its rewards. Unset: number `version`.

        Raises EngineError, EchoError or RewardError.
        """
        number = self.version if rollout is None else rollout
        tasks = plan_rollout(self.recipe, self._source, number)
        pipeline = local_pipeline(engine.worker, self._score)
        scored, _ = wait_for(lambda: pipeline.run(tasks, weight_version=engine.weight_version))
        return assemble(scored, group_size=self.recipe.rollout.group_size)

    def update(self, groups: Sequence[Group]) -> dict[str, float]:
        """The optimizer steps of one rollout; metrics by the names of docs/metrics.md. The recipe's filters are asked.

        Raises InvariantError for a loss that is not finite.
        """
        batch = make_batch(self.recipe, groups)
        update = self._trainer.update(batch.shares[0]) if batch.num_steps else None
        self.version += 1
        return {**reward_metrics(self.recipe, groups, batch), **update_metrics(update, batch, self.recipe)}

    def publish(self, engine: Engine) -> int:
        """The weights to sample with into the engine, certified by their digests; returns `version`. Raises SyncError."""
        sync_in_process(self._trainer, engine.worker, version=self.version)
        return self.version

    def weights(self) -> dict[str, Tensor]:
        """Copies of the trained weights by name, fp32, on the CPU."""
        return self._trainer.weights()

    def close(self) -> None:
        self._trainer.close()
