"""Makes a torchvision built for another torch importable: transforms and processors need none of its compiled code.

PyPI's torchvision is built for CUDA, and beside a CPU-only torch its extension does not load. torchvision carries on
without it until it registers shape rules for two operators that the extension would have declared, and fails there
(`operator torchvision::nms does not exist`); the import of nearly everything in diffusers and transformers then fails
with it. Declaring the two operators first is enough; nobody here calls them.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from types import ModuleType
from typing import Any

_AFTER_THE_EXTENSION = "torchvision._meta_registrations"
_OPERATORS = ("nms", "qnms")
_keep: list[Any] = []
"""A torch.library.Library takes its declarations back when it is collected."""


class _DeclareMissingOperators(MetaPathFinder):
    """Finds nothing: it acts just before torchvision registers its rules, where torch has no such operators."""

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> None:
        if fullname != _AFTER_THE_EXTENSION or _keep:
            return
        import torch

        if not hasattr(torch.ops.torchvision, _OPERATORS[0]):
            library = torch.library.Library("torchvision", "FRAGMENT")
            for name in _OPERATORS:
                library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
            _keep.append(library)


def install() -> None:
    """Once a process, before torchvision is first imported. Loads nothing."""
    if not any(isinstance(finder, _DeclareMissingOperators) for finder in sys.meta_path):
        sys.meta_path.insert(0, _DeclareMissingOperators())
