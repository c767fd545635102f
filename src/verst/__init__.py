"""verst: post-training of diffusion models. What is listed here is loaded when it is first used; docs/python.md."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from verst import torchvision_shim

if TYPE_CHECKING:
    from verst.api.engine import Engine as Engine
    from verst.api.engine import picture as picture
    from verst.api.engine import save as save
    from verst.api.events import AlarmRaised as AlarmRaised
    from verst.api.events import CheckpointSaved as CheckpointSaved
    from verst.api.events import Event as Event
    from verst.api.events import HeldOutSampled as HeldOutSampled
    from verst.api.events import IterationDone as IterationDone
    from verst.api.events import RunEnded as RunEnded
    from verst.api.events import events as events
    from verst.api.events import stream as stream
    from verst.api.planning import plan as plan
    from verst.api.planning import simulate as simulate
    from verst.api.recipe import Recipe as Recipe
    from verst.api.recipe import with_rewards as with_rewards
    from verst.api.result import Result as Result
    from verst.api.running import train as train
    from verst.api.runs import Checkpoint as Checkpoint
    from verst.api.runs import checkpoints as checkpoints
    from verst.api.runs import evaluate as evaluate
    from verst.api.runs import explain_ratio as explain_ratio
    from verst.api.runs import export as export
    from verst.api.runs import replay as replay
    from verst.api.runs import trace as trace
    from verst.api.runs import triage as triage
    from verst.api.runs import write_page as write_page
    from verst.api.trainer import Trainer as Trainer
    from verst.config import RlRecipe as RlRecipe
    from verst.config import SftRecipe as SftRecipe
    from verst.loops.evaluate import Evaluation as Evaluation
    from verst.loops.explain import Explanation as Explanation
    from verst.loops.planned import Plan as Plan
    from verst.loops.replay import Replay as Replay
    from verst.loops.simulate import Simulation as Simulation
    from verst.obs.triage import Triage as Triage
    from verst.trainer.export import Exported as Exported

__version__ = "0.1.0"

_FROM = {
    "verst.api.engine": ("Engine", "picture", "save"),
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
    "verst.api.planning": ("plan", "simulate"),
    "verst.api.recipe": ("Recipe", "with_rewards"),
    "verst.api.result": ("Result",),
    "verst.api.running": ("train",),
    "verst.api.runs": (
        "Checkpoint",
        "checkpoints",
        "evaluate",
        "explain_ratio",
        "export",
        "replay",
        "trace",
        "triage",
        "write_page",
    ),
    "verst.api.trainer": ("Trainer",),
    "verst.config": ("RlRecipe", "SftRecipe"),
    "verst.loops.evaluate": ("Evaluation",),
    "verst.loops.explain": ("Explanation",),
    "verst.loops.planned": ("Plan",),
    "verst.loops.replay": ("Replay",),
    "verst.loops.simulate": ("Simulation",),
    "verst.obs.triage": ("Triage",),
    "verst.trainer.export": ("Exported",),
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
