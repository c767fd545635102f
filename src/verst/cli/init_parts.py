"""What every recipe of `verst init` starts from: the model's family and size, and the machine."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verst.errors import RequestError

if TYPE_CHECKING:
    from verst.families import Family, Geometry, SamplingDefaults

_SIDE = 512
"""Pixels of an image, at most: published runs train at this size."""
_FRAMES = 5
"""Of a clip, at most: as short as they come, which every video family here can make."""


@dataclass(frozen=True, kw_only=True)
class Machine:
    gpus: int
    memory: int
    """Bytes of one GPU; without GPUs, of the host that are free."""

    @property
    def dtype(self) -> str:
        """Of the forward."""
        return "bfloat16" if self.gpus else "float32"

    def __str__(self) -> str:
        if self.gpus:
            return f"For {self.gpus} GPU{'s' if self.gpus > 1 else ''} of {gib(self.memory)}."
        return f"For processors alone, with {gib(self.memory)} of memory free."


def look(model: Path) -> tuple[Family, SamplingDefaults, Geometry]:
    """Family, its defaults, and a size to train at; reads config files alone. Raises ModelError."""
    import torch

    from verst.families import recognise
    from verst.families.skeleton import Skeletons

    family = recognise(model)
    parts = Skeletons().load(family, model, parts=("transformer", "autoencoder", "scheduler"), dtype=torch.bfloat16)
    defaults = family.sampling_defaults(parts)
    own = defaults.geometry
    smaller = replace(
        own,
        height=own.height if own.num_frames > 1 else min(own.height, _SIDE),
        width=own.width if own.num_frames > 1 else min(own.width, _SIDE),
        num_frames=min(own.num_frames, _FRAMES),
    )
    try:
        family.check_geometry(parts, smaller)
    except RequestError:
        return family, defaults, own
    return family, defaults, smaller


def this_machine() -> Machine:
    import psutil
    import torch

    if torch.cuda.is_available():
        count = torch.cuda.device_count()
        return Machine(gpus=count, memory=min(torch.cuda.get_device_properties(i).total_memory for i in range(count)))
    return Machine(gpus=0, memory=psutil.virtual_memory().available)


def model_table(model: Path, defaults: SamplingDefaults, machine: Machine, *, full: bool) -> dict[str, Any]:
    return {
        "path": str(model),
        "dtype": machine.dtype,
        "max_sequence_length": defaults.max_sequence_length,
        "finetune": {"type": "full"} if full else {"type": "lora", "rank": 32, "alpha": 64},
    }


def size_table(geometry: Geometry) -> dict[str, Any]:
    """Keys of [sampling]."""
    frames = {"num_frames": geometry.num_frames} if geometry.num_frames > 1 else {}
    return {"height": geometry.height, "width": geometry.width, **frames}


def gib(number: int) -> str:
    return f"{number / 2**30:.1f} GiB"
