"""The page of the Python API: signatures, fields and docstrings as they stand in the source, which is parsed and not run."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import verst

_PACKAGE = Path(verst.__file__).parent
ASSIGNED = ast.AnnAssign | ast.Assign
DEFINED = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.AnnAssign | ast.Assign

SECTIONS: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    (
        "Recipes",
        "A recipe is a frozen record of sections; [every key of a recipe](keys.md) lists them, as in a file, so in "
        "`recipe.trainer.lr`. `model_copy(update=...)` and `model_dump()` are pydantic's.",
        (
            "verst.api.recipe:Recipe",
            "verst.api.recipe:with_rewards",
            "verst.config.recipe:RlRecipe",
            "verst.config.supervised:SftRecipe",
        ),
    ),
    (
        "Before a run",
        "",
        (
            "verst.api.planning:plan",
            "verst.loops.planned:Plan",
            "verst.config.plan:BatchPlan",
            "verst.config.plan:ProcessPlan",
            "verst.loops.planned:StreamSteps",
            "verst.flow.steps_table:StepRow",
            "verst.loops.memory_plan:MemoryPlan",
            "verst.trainer.estimate:Item",
            "verst.api.planning:simulate",
            "verst.loops.simulate:Simulation",
            "verst.loops.simulate:Counts",
            "verst.loops.simulate:Size",
            "verst.obs.simulation:Simulated",
            "verst.obs.simulation:StageUse",
        ),
    ),
    (
        "Runs",
        "",
        (
            "verst.api.running:train",
            "verst.api.running:Rewards",
            "verst.api.result:Result",
            "verst.api.events:stream",
            "verst.api.events:events",
            "verst.api.events:Event",
            "verst.api.events:IterationDone",
            "verst.api.events:HeldOutSampled",
            "verst.api.events:AlarmRaised",
            "verst.api.events:CheckpointSaved",
            "verst.api.events:RunEnded",
        ),
    ),
    (
        "After a run",
        "",
        (
            "verst.api.runs:checkpoints",
            "verst.api.runs:Checkpoint",
            "verst.api.runs:evaluate",
            "verst.loops.evaluate:Evaluation",
            "verst.api.runs:export",
            "verst.trainer.export:Exported",
            "verst.api.runs:triage",
            "verst.obs.triage:Triage",
            "verst.obs.triage:Use",
            "verst.obs.triage:Finding",
            "verst.api.runs:trace",
            "verst.api.runs:replay",
            "verst.loops.replay:Replay",
            "verst.api.runs:explain_ratio",
            "verst.loops.explain:Explanation",
            "verst.loops.explain:StepExplanation",
            "verst.loops.explain:Difference",
            "verst.api.runs:write_page",
        ),
    ),
    (
        "Engine and trainer",
        "",
        (
            "verst.api.engine:Engine",
            "verst.api.engine:picture",
            "verst.api.engine:save",
            "verst.api.trainer:Trainer",
            "verst.families.tiny:build_tiny",
        ),
    ),
    (
        "Samples",
        "What an engine makes and a trainer takes.",
        (
            "verst.types:Latents",
            "verst.types:SampleKey",
            "verst.types:Sample",
            "verst.types:StreamTrajectory",
            "verst.types:Geometry",
            "verst.types:Conditioning",
            "verst.types:Microgroup",
            "verst.types:Scores",
            "verst.types:Group",
        ),
    ),
    (
        "Rewards of your own",
        'A function or a class, in a recipe as `type = "python"` ([Rewards](../rewards.md)), in a program by `verst.train(recipe, '
        "rewards={...})`; an installed package names it by an entry point of the group `verst.rewards`.",
        (
            "verst.rewards.python:Python",
            "verst.rewards.base:RewardBatch",
            "verst.rewards.base:Score",
            "verst.rewards.base:Reward",
        ),
    ),
    (
        "Algorithms of your own",
        'A loss of a tile of pairs, in a recipe as `type = "python"` ([Algorithms](../algorithms.md)); entry points of the group '
        "`verst.algorithms`.",
        (
            "verst.algorithms.python:Python",
            "verst.algorithms.pairs:Tile",
            "verst.algorithms.base:Policies",
            "verst.algorithms.base:Role",
            "verst.flow.transitions:StepDistribution",
            "verst.algorithms.base:PairLosses",
            "verst.algorithms.base:Algorithm",
            "verst.algorithms.base:OldPolicy",
            "verst.algorithms.base:Follows",
            "verst.algorithms.base:ScoredGroup",
            "verst.algorithms.pairs:PairBlock",
        ),
    ),
    (
        "Filters of your own",
        'A function of a group, in `rollout.filters` as `type = "python"` ([Prompts and filters](../prompts.md)); entry points of the '
        "group `verst.filters`.",
        ("verst.rollout.filters:FilterFunction", "verst.rollout.filters:GroupRewards"),
    ),
    (
        "Families of your own",
        "A class or an object with the attributes and methods of `Family`, as an entry point of the group `verst.families` whose name is "
        "the `_class_name` in the folder's `model_index.json` ([Models](../families.md)). The protocols after it are for what only some "
        "families do.",
        (
            "verst.families.base:Family",
            "verst.families.base:Part",
            "verst.families.base:Components",
            "verst.families.base:SamplingDefaults",
            "verst.flow.scheduler:FlowMatchEulerDiscreteScheduler",
            "verst.flow.scheduler:StepTransition",
            "verst.families:PerCheckpoint",
            "verst.families.base:HasSound",
            "verst.families.base:EncodesSound",
            "verst.families.base:TakesImages",
            "verst.families.base:SeesImages",
            "verst.families.base:FollowsImages",
            "verst.families.base:OwnGuidance",
            "verst.families.sequence:SplitsSequence",
            "verst.families.sequence:SequencePlan",
            "verst.families.sequence:Blocks",
            "verst.families.sequence:Attention",
            "verst.families.sequence:Along",
            "verst.families.tensor:SplitsTensors",
            "verst.families.tensor:TensorPlan",
        ),
    ),
)
"""Heading, what stands below it, and the objects, each as `module:name`."""
_RECIPES = ("verst.config.recipe:RlRecipe", "verst.config.supervised:SftRecipe")
TEXT_ONLY = {*_RECIPES, "verst.rewards.python:Python", "verst.algorithms.python:Python"}
"""Their members are told elsewhere, or are verst's own."""


@dataclass(frozen=True, kw_only=True)
class Target:
    """An object of the page."""

    path: str
    """`module:name`"""
    title: str
    """The name to use in a program."""
    node: DEFINED
    text: str

    @property
    def anchor(self) -> str:
        return self.path.replace(":", ".")


def api_page() -> str:
    """What `import verst` offers, the records in it, and the protocols of what a person brings along."""
    exported = _exported()
    found = {path: _target(path, exported) for _, _, paths in SECTIONS for path in paths}
    links = {
        target.path.rpartition(":")[2]: target.anchor for path, target in found.items() if not path.endswith(":Python")
    }
    lines = [
        "# Python API",
        "",
        "From the signatures and docstrings. [From Python](../python.md) is a program that uses them.",
        "",
    ]
    for heading, text, paths in SECTIONS:
        lines += [f"## {heading}", "", *([text, ""] if text else [])]
        for path in paths:
            lines += _described(found[path], links)
    lines += ["## Errors", "", *_errors(), ""]
    return "\n".join(lines)


def _exported() -> dict[str, str]:
    """`module:name` -> name in `verst`, by what `verst` imports for type checkers."""
    tree = ast.parse(_source("verst").read_text())
    names = [
        node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("verst.")
    ]
    found = {
        f"{node.module}:{alias.name}": f"verst.{alias.asname}" for node in names for alias in node.names if alias.asname
    }
    # These are named where the package collects them.
    found |= {path: found.pop(f"verst.config:{path.partition(':')[2]}") for path in _RECIPES}
    return found


def _source(module: str) -> Path:
    """By its place in the package: importing what stands above it would load torch."""
    folder = _PACKAGE.joinpath(*module.split(".")[1:])
    return folder / "__init__.py" if folder.is_dir() else folder.with_suffix(".py")


def _target(path: str, exported: dict[str, str]) -> Target:
    """Raises LookupError for a name that the module does not define."""
    module, _, name = path.partition(":")
    body = ast.parse(_source(module).read_text()).body
    for index, node in enumerate(body):
        if name in _names(node):
            assert isinstance(node, DEFINED)
            text = _text_below(body, index) if isinstance(node, ASSIGNED) else ast.get_docstring(node) or ""
            return Target(path=path, title=exported.get(path, f"{module}.{name}"), node=node, text=text)
    raise LookupError(f"{module} defines no {name}")


def _names(node: ast.stmt) -> list[str]:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return [node.name]
    return [ast.unparse(target) for target in _assigned(node)]


def _assigned(node: ast.stmt) -> list[ast.expr]:
    if isinstance(node, ast.Assign):
        return node.targets
    return [node.target] if isinstance(node, ast.AnnAssign) else []


def _text_below(body: list[ast.stmt], index: int) -> str:
    """The string that stands below an assignment."""
    below = body[index + 1] if index + 1 < len(body) else None
    if isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant) and isinstance(below.value.value, str):
        return inspect.cleandoc(below.value.value)
    return ""


def _described(target: Target, links: dict[str, str]) -> Iterator[str]:
    node = target.node
    yield from (f"### `{target.title}` {{#{target.anchor}}}", "")
    if isinstance(node, ast.ClassDef):
        yield from _class(target, node, links)
    elif isinstance(node, ASSIGNED):
        yield from (
            "```python",
            f"{target.path.rpartition(':')[2]} = {ast.unparse(node.value) if node.value else ''}",
            "```",
            "",
        )
        yield from (_prose(target.text), "")
    else:
        yield from _function(node, target.title)
        yield from (_prose(target.text), "")
    named = _records_in(node, links, own=target.anchor) if target.path not in TEXT_ONLY else []
    if named:
        yield from ("See " + ", ".join(f"[`{name}`](#{links[name]})" for name in named) + ".", "")


def _records_in(node: ast.AST, links: dict[str, str], *, own: str) -> list[str]:
    """Names of other records of the page in the annotations of an object, in their order."""
    annotations = [
        part
        for inner in ast.walk(node)
        for part in (
            getattr(inner, "annotation", None),
            getattr(inner, "returns", None),
            getattr(inner, "value", None) if inner is node else None,
        )
        if isinstance(part, ast.expr)
    ]
    names = [name.id for part in annotations for name in ast.walk(part) if isinstance(name, ast.Name)]
    return [name for name in dict.fromkeys(names) if name in links and links[name] != own]


def _function(node: ast.FunctionDef | ast.AsyncFunctionDef, name: str) -> Iterator[str]:
    parts = [part for part in _arguments(node.args) if part not in ("self", "cls")]
    returns = f" -> {ast.unparse(node.returns)}" if node.returns is not None and node.name != "__init__" else ""
    line = f"{name}({', '.join(parts)}){returns}"
    if len(line) > 100:
        line = f"{name}(\n" + "".join(f"    {part},\n" for part in parts) + f"){returns}"
    asynchronous = "async " if isinstance(node, ast.AsyncFunctionDef) else ""
    yield from ("```python", asynchronous + line, "```", "")


def _arguments(arguments: ast.arguments) -> Iterator[str]:
    """Each with its type and default, and the marks between them."""
    plain = [*arguments.posonlyargs, *arguments.args]
    defaults = [None] * (len(plain) - len(arguments.defaults)) + [*arguments.defaults]
    for index, (arg, default) in enumerate(zip(plain, defaults, strict=True), start=1):
        yield _argument(arg, default)
        if index == len(arguments.posonlyargs):
            yield "/"
    if arguments.vararg is not None:
        yield f"*{_argument(arguments.vararg, None)}"
    elif arguments.kwonlyargs:
        yield "*"
    for arg, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        yield _argument(arg, default)
    if arguments.kwarg is not None:
        yield f"**{_argument(arguments.kwarg, None)}"


def _argument(arg: ast.arg, default: ast.expr | None) -> str:
    kind = f": {ast.unparse(arg.annotation)}" if arg.annotation is not None else ""
    return f"{arg.arg}{kind}" + (f" = {ast.unparse(default)}" if default is not None else "")


def _class(target: Target, node: ast.ClassDef, links: dict[str, str]) -> Iterator[str]:
    if target.text:
        yield from (_prose(target.text), "")
    if target.path in TEXT_ONLY:
        return
    name = target.path.rpartition(":")[2]
    made = next((m for m in node.body if isinstance(m, ast.FunctionDef) and m.name == "__init__"), None)
    if made is not None:
        yield from _function(made, name)
        yield from (_prose(ast.get_docstring(made) or ""), "")
    fields = list(_fields(node, made))
    yield from [*fields, ""] if fields else []
    for member in node.body:
        if not isinstance(member, ast.FunctionDef | ast.AsyncFunctionDef) or (
            member.name.startswith("_") and member.name != "__call__"
        ):
            continue
        marks = {ast.unparse(mark) for mark in member.decorator_list}
        if any("property" in mark for mark in marks):
            continue
        prefix = f"{name}." if marks & {"classmethod", "staticmethod"} else ""
        yield from _function(member, f"{prefix}{'' if member.name == '__call__' else member.name}")
        yield from (_prose(ast.get_docstring(member) or ""), "")


def _fields(node: ast.ClassDef, made: ast.FunctionDef | None) -> Iterator[str]:
    """Fields, properties, and what the constructor sets and tells of."""
    for index, member in enumerate(node.body):
        if isinstance(member, ast.AnnAssign | ast.Assign):
            (of,) = _assigned(member)
            kind = f" `{ast.unparse(member.annotation)}`" if isinstance(member, ast.AnnAssign) else ""
            if not ast.unparse(of).startswith("_"):
                yield _field(ast.unparse(of), kind, _text_below(node.body, index))
        if isinstance(member, ast.FunctionDef) and any(
            "property" in ast.unparse(mark) for mark in member.decorator_list
        ):
            kind = f" `{ast.unparse(member.returns)}`" if member.returns is not None else ""
            yield _field(member.name, kind, ast.get_docstring(member) or "")
    for index, member in enumerate(made.body if made is not None else []):
        names = [ast.unparse(of).removeprefix("self.") for of in _assigned(member)]
        text = _text_below(made.body, index) if made is not None else ""
        if text and not names[0].startswith("_"):
            yield _field(names[0], "", text)


def _field(name: str, kind: str, text: str) -> str:
    return f"- **`{name}`**{kind}" + (f": {' '.join(_prose(text).split())}" if text else "")


def _errors() -> Iterator[str]:
    tree = ast.parse(_source("verst.errors").read_text())
    yield from ("In `verst.errors`. " + " ".join((ast.get_docstring(tree) or "").split()), "")
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            bases = ", ".join(ast.unparse(base) for base in node.bases)
            yield f"- **`{node.name}({bases})`**: {' '.join(_prose(ast.get_docstring(node) or '').split())}"


def _prose(text: str) -> str:
    """Plain text as Markdown; what stands between backticks stays as it is."""
    parts = text.split("`")
    parts[::2] = [part.replace("<", "&lt;").replace("*", "\\*").replace("_", "\\_") for part in parts[::2]]
    return re.sub(r"(?<!`)docs/(\w+\.md)", r"[docs/\1](../\1)", "`".join(parts))
