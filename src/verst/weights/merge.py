"""LoRA pairs merged into an engine's own weights, in fp32, always from the base that it was loaded with."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from verst.weights.digest import has_kernel
from verst.weights.lora import ADAPTER, LoraSpec, target_layers

_TEMPORARY_ELEMENTS = 2**26
"""Of one product in fp32: 256 MiB."""


class MergedLora:
    """Base weights of the adapted layers, kept; W = base + (alpha / rank) B A is computed in fp32 and rounded once.

    From the base every time, so that nothing drifts. Layers of one shape are multiplied as a batch. The weights that
    come out are those of a merged export, and not bitwise those of unmerged layers: a ratio of exactly 1 before the
    first update is out of reach in this form.
    """

    def __init__(self, module: nn.Module, spec: LoraSpec) -> None:
        """Raises ConfigError for a target that matches no layer."""
        self.spec = spec
        self._scale = spec.alpha / spec.rank
        shapes: dict[tuple[torch.Size, torch.dtype], dict[str, nn.Linear]] = {}
        for name, layer in target_layers(module, spec).items():
            shapes.setdefault((layer.weight.shape, layer.weight.dtype), {})[name] = layer
        self._batches: list[_Batch] = []
        for (shape, _), layers in shapes.items():
            size = max(1, _TEMPORARY_ELEMENTS // shape.numel())
            names = list(layers)
            for start in range(0, len(names), size):
                part = {name: layers[name] for name in names[start : start + size]}
                self._batches.append(_Batch(part, spec.rank))

    def pairs(self) -> Mapping[str, Tensor]:
        """Name of each A and B as an unmerged model calls it -> where it is kept, fp32."""
        return {name: view for batch in self._batches for name, view in batch.pairs().items()}

    @torch.no_grad()
    def merge(self) -> None:
        """Write the sum of base and pairs into the layers."""
        for batch in self._batches:
            batch.merge(self._scale)

    def to(self, device: torch.device) -> None:
        for batch in self._batches:
            batch.to(device)


class _Batch:
    """n layers of one shape: base [n, out, in] in the model's dtype, a [n, r, in] and b [n, out, r] in fp32."""

    def __init__(self, layers: dict[str, nn.Linear], rank: int) -> None:
        self.layers = layers
        self.base = torch.stack([layer.weight.detach() for layer in layers.values()])
        count, rows, columns = self.base.shape
        self.a = torch.zeros(count, rank, columns, device=self.base.device)
        self.b = torch.zeros(count, rows, rank, device=self.base.device)
        self._weights = torch.empty(0)
        self._addresses: list[int] = []

    def pairs(self) -> dict[str, Tensor]:
        found = {}
        for index, name in enumerate(self.layers):
            found[f"{name}.lora_A.{ADAPTER}.weight"] = self.a[index]
            found[f"{name}.lora_B.{ADAPTER}.weight"] = self.b[index]
        return found

    def merge(self, scale: float) -> None:
        if [layer.weight.data_ptr() for layer in self.layers.values()] != self._addresses:
            self._stack()
        if has_kernel(self.base.device):
            from verst.weights.merge_triton import merge

            merge(self.base, self.a, self.b, scale=scale, out=self._weights)
            return
        product = torch.bmm(self.b * scale, self.a)
        # One pass: read in both dtypes, summed in fp32, rounded as it is written.
        torch.add(product, self.base, out=self._weights)

    def _stack(self) -> None:
        """Give the layers' weights places in one tensor, which they leave when the module is moved."""
        self._weights = torch.empty_like(self.base)
        for layer, place in zip(self.layers.values(), self._weights, strict=True):
            layer.weight.data = place
        self._addresses = [place.data_ptr() for place in self._weights]

    def to(self, device: torch.device) -> None:
        self.base, self.a, self.b = (tensor.to(device) for tensor in (self.base, self.a, self.b))
        # The layers have left it, or hold it themselves until they do.
        self._weights, self._addresses = torch.empty(0), []
