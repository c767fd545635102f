"""Loss scaling of a float16 forward (Micikevicius et al. 2018, "Mixed Precision Training", section 3.2).

float16 gradients below 6e-8 are 0, so the loss is multiplied by a power of two and gradients are divided by it again. A
step whose gradients overflow is skipped and the factor halved; it doubles after a number of good steps in a row.
torch.amp.GradScaler has the same rule, but looks for overflow tensor by tensor in lists that cannot mix FSDP2's shards
with whole parameters. Here the global gradient norm says it: it is finite on all ranks or on none.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from verst.config.basis import DType
from verst.config.precision import PrecisionConfig

SMALLEST = 1.0


class LossScaler:
    """The factor, and how it moves."""

    def __init__(self, factor: float, interval: int) -> None:
        """interval: good steps in a row that double the factor."""
        self._interval = interval
        self._factor = torch.tensor(factor, dtype=torch.float64)
        self._good_steps = torch.zeros((), dtype=torch.int64)

    @property
    def factor(self) -> float:
        return float(self._factor)

    @property
    def exhausted(self) -> bool:
        """Gradients that overflow now are too large for float16 themselves."""
        return self.factor <= SMALLEST

    def tensors(self) -> dict[str, Tensor]:
        """What a resumed run needs; loading writes into these in place."""
        return {"loss_scale.factor": self._factor, "loss_scale.good_steps": self._good_steps}

    @torch.no_grad()
    def unscale(self, gradients: Sequence[Tensor], norm: Tensor) -> Tensor:
        """Divide in place; the norm, divided. Exact, for powers of two."""
        for gradient in gradients:
            gradient.div_(self.factor)
        return norm / self.factor

    def update(self, norm: float) -> bool:
        """Whether the step of this gradient norm may be taken; moves the factor for the next one."""
        if not math.isfinite(norm):
            self._factor.mul_(0.5)
            self._good_steps.zero_()
            return False
        self._good_steps.add_(1)
        if int(self._good_steps) == self._interval:
            self._factor.mul_(2)
            self._good_steps.zero_()
        return True


def make_scaler(precision: PrecisionConfig, *, forward: DType) -> LossScaler | None:
    """None where the forward's gradients have fp32's range."""
    if forward != "float16":
        return None
    return LossScaler(precision.first_loss_scale, precision.doubling_steps)
