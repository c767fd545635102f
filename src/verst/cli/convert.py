"""`verst convert-recipe`: the settings of another trainer as a recipe, and what became of each of them."""

from __future__ import annotations

import ast
import json
import re
import shlex
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from verst.cli.recipe_text import check_free, run_name, write_recipe
from verst.config.checks import nearest_divisor, nearest_fit
from verst.errors import ConfigError

Rule = Callable[["Draft", Any], None]
"""Takes one of their values over into a draft."""
OCR = {"type": "ocr", "mode": "scene", "target": "quoted"}
_ORDER = ("run", "model", "sampling", "prompts", "rollout", "rewards", "algorithm", "trainer", "engine", "cluster", "checkpoint", "eval")  # fmt: skip


@dataclass(kw_only=True)
class Draft:
    """A recipe in the making."""

    theirs: Mapping[str, Any]
    """All settings of the file."""
    gpus: int | None
    """Of their run, where the command says so."""
    values: dict[str, Any] = field(default_factory=dict)
    """section.key -> value."""
    rewards: list[dict[str, Any]] = field(default_factory=list)
    absent: dict[str, str] = field(default_factory=dict)
    """Their setting -> why it has no counterpart."""
    assumed: dict[str, str] = field(default_factory=dict)
    """section.key -> what was assumed and why."""

    def assume(self, key: str, value: Any, why: str) -> None:
        """Only where nothing says otherwise."""
        if key not in self.values:
            self.values[key] = value
            self.assumed[key] = f"{value!r}: {why}"

    def change(self, key: str, value: Any, why: str) -> None:
        """In place of what their setting would be."""
        if self.values.get(key) != value:
            self.assumed[key] = f"{value!r} in place of {self.values.get(key)!r}: {why}"
            self.values[key] = value

    def count(self, name: str, default: int) -> int:
        """One of their settings, or what it is where it is not said. Raises ConfigError."""
        value = self.theirs.get(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise ConfigError(
                f"{name} = {value!r} is not what that setting takes, which is a count; correct it, or leave it out"
            )
        return value

    def real(self, name: str, default: float) -> float:
        """The same of a number."""
        value = self.theirs.get(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ConfigError(
                f"{name} = {value!r} is not what that setting takes, which is a number; correct it, or leave it out"
            )
        return float(value)

    def betas(self, first: str, second: str) -> None:
        """Adam's, where either is said. Raises ConfigError."""
        if first in self.theirs or second in self.theirs:
            self.values["trainer.betas"] = [self.real(first, 0.9), self.real(second, 0.999)]

    def steps(self) -> int:
        """Denoising steps."""
        return self.positive("sampling.num_steps", 10)

    def positive(self, key: str, default: int) -> int:
        """A count of the recipe. Raises ConfigError."""
        value = self.values.setdefault(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ConfigError(
                f"{key} would be {value!r}, which must be a count from 1; correct the setting that says so"
            )
        return value

    def tables(self) -> dict[str, Any]:
        """Nested, in the order that recipes are read in."""
        nested: dict[str, Any] = {"rewards": self.rewards}
        for key, value in self.values.items():
            *parents, leaf = key.split(".")
            table = nested
            for parent in parents:
                table = table.setdefault(parent, {})
            table[leaf] = value
        return {name: nested[name] for name in _ORDER if name in nested}


def one_of(key: str, values: Mapping[Any, Any]) -> Rule:
    """Their value -> ours."""

    def rule(draft: Draft, value: Any) -> None:
        if value not in values:
            raise ValueError(f"known are {', '.join(map(repr, values))}")
        draft.values[key] = values[value]

    return rule


def number(*keys: str) -> Rule:
    """The same number, which may be written without a point."""

    def rule(draft: Draft, value: Any) -> None:
        if value is not None:
            draft.values.update(dict.fromkeys(keys, float(value)))

    return rule


def together(draft: Draft, value: Any) -> None:
    """Read with others at the end, or the way things are here anyway."""


def reward(draft: Draft, setting: str, name: str, known: Mapping[str, dict[str, Any]], weight: float) -> None:
    """One of their rewards by its name."""
    if name not in known:
        before = f"{draft.absent[setting]}; " if setting in draft.absent else ""
        draft.absent[setting] = (
            f"{before}{name} is none of docs/rewards.md by that name; type = python, http or openai is for it"
        )
        return
    draft.rewards.append({**known[name], "weight": weight})
    if "path" in known[name]:
        draft.assumed[f"rewards.{known[name]['type']}.path"] = f"{known[name]['path']!r}: nothing is downloaded"


def run(file: Path, *, out: Path, gpus: int | None) -> None:
    from verst.cli import convert_flow_grpo, convert_miles

    check_free(out)
    kind, theirs = read(file)
    source = {"flow_grpo": convert_flow_grpo, "miles_diffusion": convert_miles}[kind]
    draft = Draft(theirs=theirs, gpus=gpus)
    for name, value in theirs.items():
        _take(draft, name, value, source.RULES, source.ABSENT)
    for name, (key, value) in source.DEFAULTS.items():
        if name not in theirs:
            draft.assume(key, value, f"{kind}'s default of {name}")
    try:
        source.finish(draft)
    except ConfigError:
        raise
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{file}: a window or list of steps is not as {kind} writes it: {error}") from None
    finish(draft, out.stem)
    lines = outcome(draft)
    write_recipe(out, draft.tables(), [f"From {file.name}, settings of {kind}, by verst convert-recipe.", *lines])
    print("\n".join([f"{out}: a recipe from settings of {kind}", *lines]))


def outcome(draft: Draft) -> list[str]:
    """What was assumed and what is not there, a line each."""
    lines = [f"assumed: {key} = {why}" for key, why in draft.assumed.items()]
    lines += [f"no counterpart: {name} = {draft.theirs[name]!r}: {why}" for name, why in draft.absent.items()]
    return lines


def _take(draft: Draft, name: str, value: Any, rules: Mapping[str, str | Rule], absent: Mapping[str, str]) -> None:
    rule = rules.get(name)
    if isinstance(rule, str):
        if value is not None:
            draft.values[rule] = value
    elif rule is not None:
        try:
            rule(draft, value)
        except (TypeError, ValueError) as error:
            raise ConfigError(
                f"{name} = {value!r} is not what that setting takes ({error}); correct it, or leave it out"
            ) from None
    else:
        draft.absent[name] = absent.get(name, "verst has no such setting, or it is not known here: docs/migration.md")


def finish(draft: Draft, name: str) -> None:
    """What every recipe needs, and numbers that go together."""
    values = draft.values
    draft.assume("run.name", run_name(name), "the file's name")
    draft.assume("run.iterations", 200, "not said")
    draft.assume("run.deterministic", False, "as the other trainer, whose engine batches depend on timing")
    draft.assume("model.path", "models/model", "not said; a folder in the diffusers layout")
    draft.assume("prompts.train", "data/train.txt", "not said")
    draft.assume("prompts.heldout", "data/heldout.txt", "not said")
    draft.assume("algorithm.type", "flow_grpo", "not said")
    for key, value in (("num_groups", 8), ("group_size", 16), ("microgroup_size", 1)):
        draft.assume(f"rollout.{key}", value, "not said")
        draft.positive(f"rollout.{key}", value)
    micro = nearest_divisor(values["rollout.microgroup_size"], values["rollout.group_size"])
    draft.change("rollout.microgroup_size", micro, "it must divide rollout.group_size")
    draft.assume("trainer.tile_size", micro, "rollout.microgroup_size, for a ratio of exactly 1")
    tile = nearest_fit(draft.positive("trainer.tile_size", micro), micro)
    draft.change("trainer.tile_size", tile, "it must fit rollout.microgroup_size")
    steps = nearest_divisor(draft.positive("trainer.steps_per_rollout", 1), values["rollout.num_groups"])
    if steps != values["trainer.steps_per_rollout"]:
        draft.change("trainer.steps_per_rollout", steps, "it must divide rollout.num_groups")
    if not draft.rewards:
        draft.rewards.append(dict(OCR))
        draft.assumed["rewards"] = "ocr: none was said that verst has"
    if values.get("algorithm.kl_beta") and values.get("model.finetune", {}).get("type") == "full":
        draft.assume("algorithm.reference", {"type": "frozen"}, "without a LoRA there is no adapter to switch off")
    if values["algorithm.type"] == "nft":
        values["sampling.steps"] = {"type": "none"}
        values.pop("sampling.transition", None)
        if values.get("sampling.guidance_scale", 1) > 1:
            draft.change("sampling.guidance_scale", 1.0, "NFT samples and trains without guidance")
    _last_step(draft)
    _ranks(draft)


def _ranks(draft: Draft) -> None:
    values = draft.values
    rollout = values["rollout.num_groups"] * values["rollout.group_size"] // values["rollout.microgroup_size"]
    microgroups = rollout // values["trainer.steps_per_rollout"]
    ranks, shared = values.get("trainer.ranks", 1), values.get("trainer.parallel.ulysses", 1)
    fits = nearest_divisor(max(1, ranks // shared), microgroups) * shared
    if fits != ranks:
        draft.change("trainer.ranks", fits, f"it must divide the {microgroups} microgroups of an optimizer step")
        if values.get("cluster.placement") == {"type": "colocated"}:
            draft.change("engine.num", fits, "as many as trainer.ranks")


def _last_step(draft: Draft) -> None:
    """cps has no noise at the last step, which can therefore not be trained."""
    steps, transition = draft.values.get("sampling.steps", {}), draft.values.get("sampling.transition", {})
    last = draft.steps() - 1
    if transition.get("type") == "cps" and steps.get("high", last + 1) > last:
        size = min(steps.get("size", last), last - steps.get("low", 0))
        window = {"type": "window", "low": 0, **steps, "high": last, "size": size}
        draft.change("sampling.steps", window, "cps has no noise at the last step, so it cannot be trained")


def read(file: Path) -> tuple[str, dict[str, Any]]:
    """(whose, settings): JSON or `key = value` lines are flow_grpo's, `--flag value` miles_diffusion's."""
    try:
        text = file.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(f"file {file} does not exist") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"file {file} cannot be read: {error}") from None
    if text.lstrip().startswith("{"):
        try:
            return "flow_grpo", _flat(json.loads(text))
        except (json.JSONDecodeError, AttributeError) as error:
            raise ConfigError(f"file {file} begins as JSON and is none: {error}") from None
    if re.search(r"(^|\s)--[a-z]", text):
        return "miles_diffusion", _flags(file, text)
    return "flow_grpo", _lines(file, text)


def _flat(table: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Dotted keys; the table of rewards stays one value, for its names are no settings."""
    found: dict[str, Any] = {}
    for key, value in table.items():
        if isinstance(value, Mapping) and not key.endswith("_fn"):
            found |= _flat(value, f"{prefix}{key}.")
        else:
            found[prefix + key] = value
    return found


def _lines(file: Path, text: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for number, raw in enumerate(text.splitlines(), start=1):
        line = raw.strip()
        if not line or line.startswith("#"):
            continue
        match = re.fullmatch(r"(?:config\.)?([\w.]+)\s*[=:]\s*(.+)", line)
        if match is None:
            raise ConfigError(
                f"{file}, line {number}: {line!r} is neither `key = value` nor `--flag value`; dump the config's values, "
                "e.g. by print(config.to_json())"
            )
        found[match[1]] = _literal(match[2])
    return found


def _flags(file: Path, text: str) -> dict[str, Any]:
    """Flag -> value; True for one without, a list where there are several."""
    try:
        words = shlex.split(text.replace("\\\n", " "), comments=True)
    except ValueError as error:
        raise ConfigError(f"file {file} is no list of flags: {error}") from None
    found: dict[str, Any] = {}
    name = None
    for word in words:
        if word.startswith("--"):
            name, sign, value = word[2:].partition("=")
            found[name] = _literal(value) if sign else True
        elif name is None:
            print(f"verst: {word!r} stands before the first flag and is left out", file=sys.stderr)
        else:
            before = found[name]
            value_read = _literal(word)
            found[name] = (
                value_read if before is True else [*(before if isinstance(before, list) else [before]), value_read]
            )
    return found


def _literal(text: str) -> Any:
    """A Python literal, or the text itself."""
    try:
        return ast.literal_eval(text.split(" #")[0].strip())
    except (ValueError, SyntaxError):
        return {"true": True, "false": False, "null": None}.get(text.strip().lower(), text.strip().strip("\"'"))
