"""One rank of the RL trainer: model, tiles, update, weights out, checkpoint."""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import Store

from verst.algorithms import make_algorithm
from verst.algorithms.base import Algorithm, Follows
from verst.algorithms.pairs import PairBlock, Tile, tiles_of
from verst.config import sections as s
from verst.config.recipe import Recipe, RlRecipe
from verst.errors import ConfigError
from verst.families import recognise
from verst.families.compiled import compile_blocks
from verst.families.islands import is_island
from verst.families.loading import read_config
from verst.families.sequence import SplitsSequence, check_degrees, split_sequence
from verst.families.tensor import SplitsTensors, check_tensor_degree, split_tensors
from verst.flow.controller import make_transition
from verst.flow.determinism import make_deterministic
from verst.flow.noise import derive_seed
from verst.trainer import checkpoint
from verst.trainer.core import Ema, StepMetrics, TileLoss, Trainer
from verst.trainer.forward import Forward
from verst.trainer.parallel import Layout, join_mesh, leave_mesh, shard
from verst.trainer.policies import ReferencePolicy, TrainerPolicies
from verst.trainer.publishing import FORMS, SENDERS, Rank
from verst.trainer.recompute import recompute_blocks
from verst.trainer.scaler import make_scaler
from verst.weights.adapter_files import load_adapters
from verst.weights.loan import Lender, Loan
from verst.weights.lora import LoraSpec, adaptable, attach_lora
from verst.weights.manifest import Manifest
from verst.weights.send import Outgoing, trained_tensors

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, kw_only=True)
class UpdateMetrics:
    """Of all optimizer steps on one rollout."""

    num_steps: int
    loss: float
    grad_norm: float | None
    """Largest of the steps that were taken; None where float16 gradients overflowed in all."""
    lr: float
    policy: Mapping[str, float]
    """What the algorithm says of it; metric names without the prefix `policy/`."""
    scaling: Mapping[str, float]
    """Of a float16 forward: the smallest loss scale and the number of skipped steps; see `StepMetrics.scaling`."""


class RlTrainer:
    """Every rank makes the same calls in the same order; rank 0's answers are used."""

    def __init__(self, recipe: RlRecipe, *, rank: int, world_size: int, store: Store, device: torch.device) -> None:
        self._recipe = recipe
        self._device = device
        self.progress = 0
        """Grows with every tile and optimizer step."""
        self._dtype = DTYPES[recipe.model.dtype]
        if recipe.run.threads:
            torch.set_num_threads(recipe.run.threads)
        if recipe.run.deterministic:
            make_deterministic(device)
        self.family = recognise(recipe.model.path, fp32_modules=recipe.model.fp32_modules)
        self._forward = Forward.of(recipe.sampling, self.family, self._dtype, two_passes=recipe.guides_in_two_passes)
        absent = sorted(set(recipe.algorithm.stream_weights) - set(self.family.streams))
        if absent:
            raise ConfigError(
                f"algorithm.stream_weights names {', '.join(absent)}; {self.family.name} has the streams "
                f"{', '.join(self.family.streams)}"
            )
        self._lora = lora_spec(recipe, self.family.lora_targets)
        parallel = recipe.trainer.parallel
        config = read_config(recipe.model.path, "transformer")
        check_degrees(self.family.name, self.family, config, ulysses=parallel.ulysses, ring=parallel.ring)
        fp32 = self.family.fp32_modules if self._dtype != torch.float32 else ()
        check_tensor_degree(self.family.name, self.family, config, parallel.tensor, fp32_modules=fp32)
        self._layout = join_mesh(
            rank=rank,
            world_size=world_size,
            store=store,
            device=device,
            parallel=parallel,
            offload=recipe.trainer.offload.parameters,
        )
        try:
            self._build(recipe, self._layout)
        except BaseException:
            leave_mesh()
            raise
        self._saver = checkpoint.BackgroundSaver() if recipe.checkpoint.async_save else None
        beside = isinstance(recipe.cluster.placement, s.ColocatedPlacement)
        context = Rank(rank=rank, ranks=world_size, store=store, device=device, feeds_engine=beside)
        self._sender = SENDERS[type(recipe.sync)](recipe.sync, context)

    def _build(self, recipe: RlRecipe, layout: Layout) -> None:
        # What is trained has its own dtype; a base that only carries a LoRA stays in that of the forward.
        wide = recipe.trainer.precision.master == "float32"
        dtype = torch.float32 if wide and self._lora is None else self._dtype
        offload = recipe.trainer.offload
        # Where the GPU need not hold all of it, it never does: FSDP2 takes block after block there.
        device = torch.device("cpu") if offload.parameters or offload.reference else self._device
        loaded = self.family.load(recipe.model.path, parts=("transformer",), dtype=dtype, device=device)
        self.transformer = loaded.transformer
        # An engine's from_pretrained casts the buffers of the file, and leaves computed ones (rotary angles) in fp32.
        stored = self.transformer.state_dict().keys()
        for name, buffer in self.transformer.named_buffers():
            if name in stored and buffer.is_floating_point() and not is_island(name, self.family.fp32_modules):
                buffer.data = buffer.data.to(self._dtype)
        # Every rank draws the same A matrices; FSDP2 then keeps its own shard of them.
        torch.manual_seed(derive_seed(recipe.run.seed, "lora") % 2**32)
        if self._lora is None:
            self.transformer.requires_grad_(True)
        else:
            attach_lora(self.transformer, self._lora)
            for p in self.transformer.parameters():
                if p.requires_grad and wide:
                    p.data = p.data.float()
            finetune = recipe.model.finetune
            if isinstance(finetune, s.LoraFinetune) and finetune.init is not None:
                load_adapters(self.transformer, self._lora, finetune.init)
        config = recipe.algorithm
        frozen = None
        if config.needs_reference and isinstance(config.reference, s.FrozenReference):
            frozen = copy.deepcopy(self.transformer).requires_grad_(False).eval()
            self._distribute(frozen, layout, offload=offload.reference)
        placement = recipe.cluster.placement
        lends = isinstance(placement, s.ColocatedPlacement) and placement.share_base
        self._lender = Lender(self.transformer, device=self._device) if lends else None
        every = recipe.trainer.recompute_every
        parts = self._distribute(
            self.transformer, layout, offload=offload.parameters, recompute_every=every, frozen_whole=lends
        )
        total = recipe.run.iterations * recipe.trainer.steps_per_rollout
        scaler = make_scaler(recipe.trainer.precision, forward=recipe.model.dtype)
        modules = {"transformer": self.transformer}
        self.core = Trainer(modules, recipe.trainer, total_steps=total, layout=layout, scaler=scaler, parts=parts)
        reference = None
        if config.needs_reference:
            assert config.reference is not None
            reference = ReferencePolicy(
                config.reference, self.transformer, named=self.core.named, ema=self.core.ema, frozen=frozen
            )
        self._algorithm = make_algorithm(config, sampling=recipe.sampling, seed=recipe.run.seed)
        declared = self._algorithm.old
        old = Ema(self.core.named, 0.0, host=offload.reference) if isinstance(declared, Follows) else declared
        self.old = old if isinstance(old, Ema) else None
        """The policy that samples, where it is not the live one."""
        self._rollouts = torch.zeros((), dtype=torch.int64)
        self._policies = TrainerPolicies(
            forward=self._forward,
            live=self.transformer,
            named=self.core.named,
            reference=reference,
            old=old,
            transition=make_transition(recipe.sampling.transition.type, recipe.sampling.transition.eta),
        )

    def _distribute(
        self,
        module: nn.Module,
        layout: Layout,
        *,
        offload: bool,
        recompute_every: int | None = None,
        frozen_whole: bool = False,
    ) -> set[str]:
        """The parameters, as the trainer names them, of whose gradients each rank then has a part."""
        parts: set[str] = set()
        for model in adaptable(module):
            split = None
            if layout.sequence is not None:
                assert isinstance(self.family, SplitsSequence)
                split = split_sequence(model, self.family.sequence_plan, layout.sequence)
            if layout.tensor is not None:
                assert isinstance(self.family, SplitsTensors)
                parts |= {
                    f"transformer.{name}" for name in split_tensors(model, self.family.tensor_plan, layout.tensor)
                }
            compile_blocks(model, self.family.fsdp_blocks, backend=self._recipe.model.compile)
            if recompute_every is not None:
                recompute_blocks(model, self.family.fsdp_blocks, every=recompute_every, split=split)
        shard(
            module,
            blocks=self.family.fsdp_blocks,
            mesh=layout.fsdp,
            compute_dtype=self._dtype,
            fp32_modules=self.family.fp32_modules,
            reduce_dtype=DTYPES[self._recipe.trainer.precision.reduce],
            offload=offload,
            frozen_whole=frozen_whole,
        )
        return parts

    def update(self, steps: Sequence[Sequence[PairBlock]]) -> UpdateMetrics:
        """One optimizer step for each entry of `steps`: this rank's share of the pairs of that step.

        Ranks may bring unlike numbers of tiles; the shorter ones repeat a tile with weight 0.
        """
        rollout: Iterable[tuple[list[Tile], int]] = (self._tiles(blocks) for blocks in steps)
        if self._algorithm.old == "start":
            # Else the tiles of one step are on the device at a time.
            rollout = list(rollout)
            self._policies.before_rollout([tiles for tiles, _ in rollout])
        results = [(self._step(tiles, num_pairs), num_pairs) for tiles, num_pairs in rollout]
        self._move_old_policy()
        return UpdateMetrics(
            num_steps=len(results),
            loss=sum(m.loss for m, _ in results) / len(results),
            grad_norm=max((m.grad_norm for m, _ in results if m.grad_norm is not None), default=None),
            lr=results[-1][0].lr,
            policy=policy_metrics(results),
            scaling=_scaling([m.scaling for m, _ in results]),
        )

    def _tiles(self, blocks: Sequence[PairBlock]) -> tuple[list[Tile], int]:
        """Tiles of one optimizer step, as many on each rank, and the pairs that count on all ranks."""
        size = self._recipe.trainer.tile_size
        tiles = tiles_of(blocks, tile_size=size, device=self._device)
        counts = self._gather(torch.tensor([len(tiles), sum(b.num_pairs for b in blocks)]))
        padding = int(counts[:, 0].max()) - len(tiles)
        if padding:
            tiles += [tiles_of([blocks[0].masked()], tile_size=size, device=self._device)[0]] * padding
        return tiles, int(counts[:, 1].sum())

    def _step(self, tiles: Sequence[Tile], num_pairs: int) -> StepMetrics:
        self._policies.before_step(tiles)
        metrics = self.core.step([functools.partial(self._tile_loss, tile, num_pairs) for tile in tiles])
        self._policies.after_step(tiles)
        self.progress += 1
        return metrics

    def _tile_loss(self, tile: Tile, num_pairs: int) -> TileLoss:
        self.progress += 1
        return tile_loss(self._algorithm, self._policies, tile, num_pairs=num_pairs)

    def _move_old_policy(self) -> None:
        """Once a rollout, after its optimizer steps."""
        if self.old is not None and isinstance(self._algorithm.old, Follows):
            self.old.decay = self._algorithm.old.decay(int(self._rollouts))
            self.old.update(self.core.named)
            self._rollouts += 1

    def publish(self, version: int, *, ema: bool = False, receivers: int = 1) -> Manifest | None:
        """The weights to sample with, ready for engines to take until `unpublish`; the manifest on rank 0, and on every
        rank that has an engine beside it.

        They are the live ones, the old policy's where the algorithm has one that samples, or the moving average.
        """
        average = self.core.ema if ema else self.old
        assert average is not None or not ema
        source = self.core.named if average is None else average.shadow
        named = {name.removeprefix("transformer."): value for name, value in source.items()}
        form = FORMS[self._recipe.sync.lora]
        # What is added up, or held, in fp32 travels in fp32.
        wide = [name for name in named if form == "merged" or is_island(name, self.family.fp32_modules)]
        dtypes = dict.fromkeys(named, self._dtype) | dict.fromkeys(wide, torch.float32)
        outgoing = Outgoing(version=version, tensors=named, dtypes=dtypes, lora=self._lora, form=form)
        return self._sender.publish(outgoing, receivers=receivers)

    def lend(self) -> Loan | None:
        """This rank's frozen weights for the engine on its device (`cluster.placement.share_base`)."""
        return None if self._lender is None else self._lender.loan

    def send(self) -> str | None:
        """Beside the engines' work where the manifest has no digest: the digest of what was sent, on rank 0."""
        return self._sender.send()

    def unpublish(self) -> None:
        self._sender.release()

    def save(self, root: Path, iteration: int) -> None:
        """Write this rank's part of the checkpoint of `iteration`, a LoRA in PEFT's layout too; the driver publishes it.

        With `checkpoint.async_save` it returns once the tensors are staged; see `saved` and `finish_save`.
        """
        folder = checkpoint.partial_folder(root, iteration)
        self.finish_save()
        if self._saver is None:
            checkpoint.write_tensors(folder, self._state(), alone=False)
        else:
            self._saver.begin(folder, self._state())
        if self._lora is not None:
            whole = trained_tensors(self.core.named, dtype=torch.float32)
            if dist.get_rank() == 0:
                named = {name.removeprefix("transformer."): value for name, value in whole.items()}
                checkpoint.write_adapter_files(folder, self.transformer, named, self._lora)

    def saved(self) -> bool:
        """Whether nothing of this rank is in flight. Raises CheckpointError for a write that failed."""
        return self._saver is None or self._saver.done()

    def finish_save(self) -> None:
        """Wait for what is in flight. Raises like `saved`."""
        if self._saver is not None:
            self._saver.finish()

    def load(self, folder: Path) -> None:
        """Continue from a published checkpoint, whatever number of ranks wrote it."""
        counters = {"num_steps": torch.zeros((), dtype=torch.int64)}
        checkpoint.read_tensors(folder, {**self.core.tensors(), **self._old_tensors(), **counters}, alone=False)
        self.core.num_steps = int(counters["num_steps"])

    def _state(self) -> dict[str, Tensor]:
        return {**self.core.tensors(), **self._old_tensors(), "num_steps": torch.tensor(self.core.num_steps)}

    def _old_tensors(self) -> dict[str, Tensor]:
        if self.old is None:
            return {}
        return {"old.rollouts": self._rollouts, **{f"old.{name}": value for name, value in self.old.shadow.items()}}

    def weights(self) -> dict[str, Tensor]:
        """Copies of the trained weights, unsharded, fp32, on the CPU. A collective."""
        return {name: value.clone() for name, value in trained_tensors(self.core.named, dtype=torch.float32).items()}

    def close(self) -> None:
        if self._saver is not None:
            self._saver.close()
        self._sender.close()
        if self._lender is not None:
            self._lender.close()
        leave_mesh()

    def _gather(self, row: Tensor) -> Tensor:
        rows = [torch.zeros_like(row, device=self._device) for _ in range(self._layout.data_ranks)]
        dist.all_gather(rows, row.to(self._device), group=self._layout.data)
        return torch.stack(rows).cpu()


def tile_loss(algorithm: Algorithm, policies: TrainerPolicies, tile: Tile, *, num_pairs: int) -> TileLoss:
    """The algorithm's loss of a tile, as its share of the mean over the pairs that count in the optimizer step."""
    out = algorithm.loss(tile, policies)
    policies.after_tile()
    return TileLoss(
        loss=(out.loss * tile.weight).sum() / num_pairs,
        sums={name: (value * tile.weight).sum() for name, value in out.means.items()},
        maxima={name: (value * tile.weight).max() for name, value in out.maxima.items()},
    )


def _scaling(steps: Sequence[Mapping[str, float]]) -> dict[str, float]:
    if not steps[0]:
        return {}
    return {
        "loss_scale": min(step["loss_scale"] for step in steps),
        "overflow_steps": sum(step["overflow_steps"] for step in steps),
    }


def policy_metrics(steps: Sequence[tuple[StepMetrics, int]]) -> dict[str, float]:
    """Means over the pairs of all optimizer steps on a rollout, and maxima of the first: before any update."""
    pairs = sum(n for _, n in steps)
    means = {name: sum(m.sums[name] for m, _ in steps) / pairs for name in steps[0][0].sums}
    return {**means, **steps[0][0].maxima}


def lora_spec(recipe: Recipe, default_targets: tuple[str, ...]) -> LoraSpec | None:
    """The recipe's LoRA; None for full fine-tuning."""
    finetune = recipe.model.finetune
    if not isinstance(finetune, s.LoraFinetune):
        return None
    return LoraSpec(rank=finetune.rank, alpha=finetune.alpha, targets=finetune.targets or default_targets)
