"""verst: post-training of diffusion models. What is listed here is loaded when it is first used; docs/python.md."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from verst import torchvision_shim

if TYPE_CHECKING:
    from verst.api.engine import Engine as Engine
    from verst.api.engine import picture as picture
    from verst.api.events import AlarmRaised as AlarmRaised
    from verst.api.events import CheckpointSaved as CheckpointSaved
    from verst.api.events import Event as Event
    from verst.api.events import HeldOutSampled as HeldOutSampled
    from verst.api.events import IterationDone as IterationDone
    from verst.api.events import RunEnded as RunEnded
    from verst.api.events import events as events
    from verst.api.events import stream as stream
    from verst.api.recipe import Recipe as Recipe
    from verst.api.recipe import with_rewards as with_rewards
    from verst.api.result import Result as Result
    from verst.api.running import train as train
    from verst.api.trainer import Trainer as Trainer
    from verst.config import RlRecipe as RlRecipe
    from verst.config import SftRecipe as SftRecipe

__version__ = "0.1.0"

_FROM = {
    "verst.api.engine": ("Engine", "picture"),
    "verst.api.events": (
        "AlarmRaised",
        "CheckpointSaved",
        "Event",
        "HeldOutSampled",
        "IterationDone",
        "RunEnded",
        "events",
        "stream",
    ),
    "verst.api.recipe": ("Recipe", "with_rewards"),
    "verst.api.result": ("Result",),
    "verst.api.running": ("train",),
    "verst.api.trainer": ("Trainer",),
    "verst.config": ("RlRecipe", "SftRecipe"),
}
_MODULE_OF = {name: module for module, names in _FROM.items() for name in names}

torchvision_shim.install()


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'verst' has no attribute {name!r}")
    value = getattr(import_module(_MODULE_OF[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULE_OF})
