"""An engine's sleep: the memory of its weights is somebody else's for a while."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn

from verst.errors import RequestError
from verst.families import Components
from verst.weights.lora import is_lora_parameter, lora_spec_of
from verst.weights.parking import Parking
from verst.weights.receive import WeightReceiver

Keep = Literal["all", "others"]


class Sleep:
    """Of one model; what it computes after `end` has the bits of before `begin`."""

    def __init__(self, components: Components, receiver: WeightReceiver, *, base_is_borrowed: bool) -> None:
        """base_is_borrowed: the transformer's memory is another process's, but for a LoRA."""
        self._components, self._receiver = components, receiver
        self._base_is_borrowed = base_is_borrowed
        self._parking = Parking()

    def begin(self, keep: Keep) -> None:
        """keep: "all" wait in host memory; "others" gives the transformer's weights up: the next update brings them.

        Raises RequestError where no update does: under a LoRA, merged or not.
        """
        transformer = self._components.transformer
        with_lora = self._receiver.holds_merged_lora or lora_spec_of(transformer) is not None
        if keep == "others" and (with_lora or self._base_is_borrowed):
            raise RequestError(
                f"keep = {keep!r}: an update brings this engine LoRA pairs alone, its base must be kept: all"
            )
        given_up = {id(p): p for p in transformer.parameters()} if keep == "others" else {}
        # First what lies beside the module: parking ends by giving the device back what nobody holds any more.
        self._receiver.to(torch.device("cpu"))
        self._parking.park([t for t in self._own() if id(t) not in given_up], list(given_up.values()))
        if given_up:
            self._receiver.forget_values()

    def end(self) -> None:
        self._parking.restore()
        self._receiver.to(self._components.device)

    def num_bytes(self) -> int:
        """Of weights in memory of this process's own."""
        return sum(tensor.nbytes for tensor in self._own())

    def _own(self) -> list[Tensor]:
        """Parameters and buffers of all modules, each once, without what is borrowed."""
        modules = [m for m in self._components.modules.values() if isinstance(m, nn.Module)]
        found = {id(t): t for m in modules for t in (*m.parameters(), *m.buffers())}
        if self._base_is_borrowed:
            transformer = self._components.transformer
            lora = {id(p) for name, p in transformer.named_parameters() if is_lora_parameter(name)}
            for tensor in (*transformer.parameters(), *transformer.buffers()):
                if id(tensor) not in lora:
                    del found[id(tensor)]
        return list(found.values())
