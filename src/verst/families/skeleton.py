"""A model of shapes alone: built from its config files in a moment, whatever its size; no weight is read.

Parameters are fake tensors (torch's FakeTensorMode: shape, dtype and storage size without memory). Modules take real
tensors, so that whatever a family does around them (tokens, masks, lengths) is computed for real.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._pytree import tree_map_only

from verst.families.base import Components, Family, Part
from verst.families.islands import is_island


class Skeletons:
    """Modules of one checkpoint that share a fake mode."""

    def __init__(self) -> None:
        self.mode = FakeTensorMode(allow_non_fake_inputs=True)
        self.watch: AbstractContextManager[Any] = nullcontext()
        """Entered inside the mode around each forward: a dispatch mode outside of it would see nothing."""
        self.taken: Callable[[Tensor, Tensor], object] = lambda real, fake: None
        """Told of each real tensor that goes into a module, and of the fake one in its place."""

    def load(self, family: Family, folder: Path, *, parts: Iterable[Part], dtype: torch.dtype) -> Components:
        """Raises ModelError. A transformer answers with fake tensors, an encoder with zeros of the right shape."""
        components = family.load(folder, parts=parts, dtype=dtype, device=torch.device("meta"))
        components.device = torch.device("cpu")
        for name, module in components.modules.items():
            if isinstance(module, nn.Module):
                trained = name.startswith("transformer")
                self.adopt(module, fp32_modules=family.fp32_modules if trained else (), answer_zeros=not trained)
        return components

    def adopt(self, module: nn.Module, *, fp32_modules: tuple[str, ...] = (), answer_zeros: bool = False) -> None:
        """A module whose parameters are on the meta device."""
        self.fill(module, fp32_modules=fp32_modules)
        for owner in module.modules():
            # Tables, of which a real one would be made fake anew at each use.
            for held in (owner._buffers, owner.__dict__):
                held.update({k: self.mode.from_tensor(v) for k, v in held.items() if isinstance(v, Tensor)})
        module.forward = functools.partial(self._forward, module.forward, answer_zeros)

    def fill(self, module: nn.Module, *, dtype: torch.dtype | None = None, fp32_modules: tuple[str, ...] = ()) -> None:
        """Parameters on the meta device become fake ones, in `dtype` or their own; islands of fp32 in that."""
        made: dict[int, nn.Parameter] = {}
        for path, p in list(module.named_parameters(remove_duplicate=False)):
            if p.device.type == "meta":
                owner, _, name = path.rpartition(".")
                wanted = torch.float32 if is_island(path, fp32_modules) else dtype or p.dtype
                if id(p) not in made:  # tied weights stay one
                    with self.mode:
                        value = torch.empty(p.shape, dtype=wanted)
                    made[id(p)] = nn.Parameter(value, requires_grad=p.requires_grad)
                module.get_submodule(owner).register_parameter(name, made[id(p)])

    def _fake(self, value: Tensor) -> Tensor:
        if isinstance(value, FakeTensor):
            return value
        fake = self.mode.from_tensor(value)
        self.taken(value, fake)
        return fake

    def _forward(self, forward: Callable[..., Any], answer_zeros: bool, *args: Any, **kwargs: Any) -> Any:
        with self.mode, self.watch:
            args, kwargs = tree_map_only(Tensor, self._fake, (args, kwargs))
            out = forward(*args, **kwargs)
        return tree_map_only(FakeTensor, _zeros, out) if answer_zeros else out


def _zeros(value: Tensor) -> Tensor:
    # Outside of the mode, on a device that reads no memory until somebody does.
    return torch.zeros(value.shape, dtype=value.dtype)
