"""The optimizer side of training, whatever the loss: tiles in, one optimizer step out.

A tile is a closure that runs one forward; the trainer runs its backward at once, so only one tile's activations live.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from verst.config.sections import TrainerConfig
from verst.errors import InvariantError
from verst.trainer.host import HostOptimizer, to_host
from verst.trainer.optimizers import make_optimizer, state_tensors
from verst.trainer.parallel import Layout
from verst.trainer.scaler import LossScaler
from verst.trainer.whole import add_parts, full, reduce_whole, total_norm, whole_parameters


@dataclass(frozen=True, kw_only=True)
class TileLoss:
    loss: Tensor
    """Scalar: this tile's share of the mean over the WHOLE optimizer step (all tiles, all ranks)."""
    sums: Mapping[str, Tensor] = field(default_factory=dict)
    """Scalars that are added up over tiles and ranks."""
    maxima: Mapping[str, Tensor] = field(default_factory=dict)
    """Scalars of which the largest over tiles and ranks is reported."""


@dataclass(frozen=True, kw_only=True)
class StepMetrics:
    loss: float
    grad_norm: float | None
    """Before clipping; None where a float16 gradient overflowed, so that the step was skipped."""
    lr: float
    """Used for this step."""
    sums: dict[str, float]
    maxima: dict[str, float]
    loss_scale: float | None = None
    """What the loss was multiplied by; None where it is not."""

    @property
    def scaling(self) -> dict[str, float]:
        """Metrics of a float16 forward, without the prefix `train/`; empty for others."""
        if self.loss_scale is None:
            return {}
        return {"loss_scale": self.loss_scale, "overflow_steps": float(self.grad_norm is None)}


class Trainer:
    """Owns the trained parameters of `modules`, their optimizer, learning-rate schedule and moving average.

    With a layout the modules are already sharded by FSDP2 over it and every rank makes the same calls.
    """

    def __init__(
        self,
        modules: Mapping[str, nn.Module],
        config: TrainerConfig,
        *,
        total_steps: int,
        layout: Layout | None = None,
        scaler: LossScaler | None = None,
        parts: Collection[str] = (),
    ) -> None:
        """scaler: of a float16 forward. parts: trained parameters of whose gradients each rank of `layout.tensor` has a
        part."""
        self.modules = dict(modules)
        self._layout = layout
        self._parts = parts
        self._config = config
        self._scaler = scaler
        self._total_steps = total_steps
        self.named = {
            f"{module}.{name}": p
            for module, net in self.modules.items()
            for name, p in net.named_parameters()
            if p.requires_grad
        }
        if not self.named:
            raise InvariantError("nothing to train: no parameter of the trained modules requires a gradient")
        self.optimizer = make_optimizer(config, list(self.named.values()))
        self.num_steps = 0
        """Optimizer steps taken or, where float16 gradients overflowed, skipped."""
        self.lr_scale = 1.0
        """Factor on the schedule's learning rate; no part of the tensors."""
        offload = config.offload
        self._take_step: Callable[[], object] = self.optimizer.step
        if offload.optimizer and not offload.parameters:
            self._take_step = HostOptimizer(self.optimizer).step
        self.ema = None if config.ema_decay is None else Ema(self.named, config.ema_decay, host=offload.reference)

    def step(self, tiles: Sequence[Callable[[], TileLoss]]) -> StepMetrics:
        """One optimizer step on the mean that the tiles' losses add up to.

        Every rank brings the same number of tiles. Raises InvariantError, before anything is updated, when loss or
        gradient is not finite; with a scaler such a gradient skips the step as long as a smaller factor may help.
        """
        self.optimizer.zero_grad(set_to_none=True)
        loss, sums, maxima = self._backward(tiles)
        trained = [p for p in self.named.values() if p.grad is not None]
        gradients = [p.grad for p in trained if p.grad is not None]
        norm = total_norm(gradients)
        loss_scale, may_help = None, False
        if self._scaler is not None:
            loss_scale, may_help = self._scaler.factor, not self._scaler.exhausted
            norm = self._scaler.unscale(gradients, norm)
        grad_norm = float(norm)
        finite = math.isfinite(grad_norm)
        # Before clipping, which would make every gradient NaN and so hide where it began.
        if not math.isfinite(loss) or not (finite or may_help):
            raise InvariantError(self._describe_non_finite(loss, grad_norm))
        lr = self.lr_at(self.num_steps) * self.lr_scale
        self.num_steps += 1
        if self._scaler is None or self._scaler.update(grad_norm):
            self._take(trained, norm, lr)
        return StepMetrics(
            loss=loss,
            grad_norm=grad_norm if finite else None,
            lr=lr,
            sums=sums,
            maxima=maxima,
            loss_scale=loss_scale,
        )

    def _take(self, trained: Sequence[nn.Parameter], norm: Tensor, lr: float) -> None:
        if self._config.grad_clip is not None:
            torch.nn.utils.clip_grads_with_norm_(trained, self._config.grad_clip, norm, foreach=False)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self._take_step()
        if self.ema is not None:
            self.ema.update(self.named)

    def lr_at(self, step: int) -> float:
        """The learning rate of optimizer step `step` (0-based): linear warm-up, then the schedule down to 0."""
        config = self._config
        if step < config.warmup_steps:
            return config.lr * (step + 1) / config.warmup_steps
        if config.schedule == "constant":
            return config.lr
        progress = min(1.0, (step - config.warmup_steps) / max(1, self._total_steps - config.warmup_steps))
        if config.schedule == "linear":
            return config.lr * (1 - progress)
        return config.lr * 0.5 * (1 + math.cos(math.pi * progress))

    def tensors(self) -> dict[str, Tensor]:
        """Everything tensor-valued that a resumed run needs, by name; loading writes into these in place."""
        state = {f"model.{name}": p.detach() for name, p in self.named.items()}
        state |= {f"optimizer.{name}": value for name, value in state_tensors(self.optimizer, self.named).items()}
        if self.ema is not None:
            state |= {f"ema.{name}": value for name, value in self.ema.shadow.items()}
        if self._scaler is not None:
            state |= self._scaler.tensors()
        return state

    def _backward(self, tiles: Sequence[Callable[[], TileLoss]]) -> tuple[float, dict[str, float], dict[str, float]]:
        # Only a module that every tile goes through may leave its gradients unreduced until the last one: of several
        # experts, one that the last tile has no rows for would keep them for good.
        whole = [net for net in self.modules.values() if isinstance(net, FSDPModule)]
        sharded = [m for net in whole for m in net.modules() if isinstance(m, FSDPModule)]
        # FSDP2 averages gradients over all ranks, while the tiles' losses add up to the mean over the data ranks. Ranks
        # of one sequence have the same loss, and the mean over them is its gradient (flow/exchange.py).
        scale: float = 1 if self._layout is None else self._layout.data_ranks
        if self._scaler is not None:
            scale *= self._scaler.factor
        losses: list[Tensor] = []
        sums: dict[str, list[Tensor]] = {}
        maxima: dict[str, list[Tensor]] = {}
        every = self._config.reduce_every_tile or self._config.offload.parameters
        for index, tile in enumerate(tiles):
            for net in sharded:
                net.set_requires_gradient_sync(every or index == len(tiles) - 1, recurse=False)
            out = tile()
            (out.loss * scale).backward()
            losses.append(out.loss.detach())
            for key, value in out.sums.items():
                sums.setdefault(key, []).append(value.detach())
            for key, value in out.maxima.items():
                maxima.setdefault(key, []).append(value.detach())
        if self._layout is not None:
            if self._layout.tensor is not None:
                add_parts([p for name, p in self.named.items() if name in self._parts], self._layout.tensor.get_group())
            reduce_whole(whole_parameters(self.named.values()), self._layout.fsdp)
        total = self._reduce(torch.stack(losses).sum(), dist.ReduceOp.SUM)
        return (
            total,
            {key: self._reduce(torch.stack(values).sum(), dist.ReduceOp.SUM) for key, values in sums.items()},
            {key: self._reduce(torch.stack(values).max(), dist.ReduceOp.MAX) for key, values in maxima.items()},
        )

    def _reduce(self, value: Tensor, op: dist.ReduceOp.RedOpType) -> float:
        if self._layout is not None and self._layout.data_ranks > 1:
            value = value.clone()
            dist.all_reduce(value, op=op, group=self._layout.data)
        return float(value)

    def _describe_non_finite(self, loss: float, grad_norm: float) -> str:
        names = [name for name, p in self.named.items() if p.grad is not None and not full(p.grad).isfinite().all()]
        where = f"; non-finite gradients in {', '.join(names[:5])}" if names else ""
        return (
            f"optimizer step {self.num_steps}: loss = {loss}, gradient norm = {grad_norm}{where}. "
            "Nothing was updated; lower trainer.lr or look at the rewards and the dtype."
        )


class Ema:
    """Exponential moving average of the trained parameters in fp32, updated once an OPTIMIZER step."""

    def __init__(self, named: Mapping[str, nn.Parameter], decay: float, *, host: bool = False) -> None:
        """host: it lies in host memory, and a tensor comes to the device when it is used."""
        self.decay = decay
        self._copied: Callable[[Tensor], Tensor] = to_host if host else (lambda p: p.detach().clone())
        # A bf16 average would never move: the step (1 - decay) is below its last bit.
        self.shadow = {name: self._copied(p.detach().to(torch.float32)) for name, p in named.items()}

    @torch.no_grad()
    def update(self, named: Mapping[str, nn.Parameter]) -> None:
        for name, p in named.items():
            average = self.shadow[name].to(p.device)
            average.mul_(self.decay).add_(p.detach(), alpha=1 - self.decay)
            if average is not self.shadow[name]:
                self.shadow[name].copy_(average)

    @contextmanager
    def applied(self, named: Mapping[str, nn.Parameter]) -> Iterator[None]:
        """The averaged weights stand in the module inside this block, the live ones after it."""
        live = {name: self._copied(p) for name, p in named.items()}
        _assign(named, self.shadow)
        try:
            yield
        finally:
            _assign(named, live)


@torch.no_grad()
def _assign(named: Mapping[str, nn.Parameter], values: Mapping[str, Tensor]) -> None:
    for name, p in named.items():
        p.copy_(values[name])
