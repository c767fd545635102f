"""Islands of fp32 in a model of half precision: which parameters, and how a module becomes one.

What is declared is `Family.fp32_modules`: the model's own list, which its code is written for, and names that a recipe
adds. Engine and trainer load by it, so both compute the same modules in the same dtype.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from verst.errors import ModelError


def is_island(name: str, fp32_modules: Sequence[str]) -> bool:
    """Whether the parameter, buffer or module of this dotted name stays fp32; a LoRA pair is as the layer it is on."""
    return not set(fp32_modules).isdisjoint(name.split("."))


def with_islands(model_class: type, fp32_modules: Sequence[str]) -> type:
    """The diffusers class whose from_pretrained keeps just these in fp32; itself where that is its own list."""
    if set(getattr(model_class, "_keep_in_fp32_modules", None) or ()) == set(fp32_modules):
        return model_class
    # The name and module are read by diffusers when it saves a pipeline and picks LoRA rules.
    attributes = {"_keep_in_fp32_modules": list(fp32_modules), "__module__": model_class.__module__}
    return type(model_class.__name__, (model_class,), attributes)


def compute_in_fp32(model: nn.Module, pattern: str) -> None:
    """Modules called `pattern` take their inputs in fp32 and answer in the dtype of the first one.

    For modules whose surroundings were not written for it. In a model that is fp32 throughout nothing changes. Raises
    ModelError where no module that is called has that name.
    """
    named = {name: module for name, module in model.named_modules() if name.rpartition(".")[2] == pattern}
    called = [module for module in named.values() if not isinstance(module, nn.ModuleList | nn.ModuleDict)]
    if not called:
        known = sorted({part for name, _ in model.named_modules() for part in name.split(".") if not part.isdecimal()})
        what = "a list of modules" if named else "no module"
        raise ModelError(
            f"model.fp32_modules: {pattern!r} is {what} of {type(model).__name__}; names of modules there: "
            f"{', '.join(name for name in known if name)}"
        )
    for module in called:
        module.register_forward_pre_hook(_widen, with_kwargs=True)
        module.register_forward_hook(_narrow, with_kwargs=True)


def _widen(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    # The hook that answers gets what `forward` got: the caller's dtype is only known here.
    module._verst_dtype = next((x.dtype for x in (*args, *kwargs.values()) if _is_float(x)), torch.float32)  # type: ignore[assignment]
    return tuple(_to(x, torch.float32) for x in args), {key: _to(x, torch.float32) for key, x in kwargs.items()}


def _narrow(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> Any:
    dtype: Any = module._verst_dtype
    return tuple(_to(x, dtype) for x in out) if isinstance(out, tuple) else _to(out, dtype)


def _to(value: Any, dtype: torch.dtype) -> Any:
    return value.to(dtype) if _is_float(value) else value


def _is_float(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()
