"""`verst init`: a recipe for a model folder, with sizes that fit the machine."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from verst.cli.init_parts import Machine, gib, look, model_table, size_table, this_machine
from verst.cli.init_sft import is_there, sft_tables
from verst.cli.options import waiting
from verst.cli.recipe_text import check_free, run_name, write_recipe
from verst.config import parse_recipe
from verst.errors import ConfigError, VerstError

if TYPE_CHECKING:
    from verst.families import Family, Geometry, SamplingDefaults
    from verst.obs.waiting import Tell

ALGORITHMS = ("flow_grpo", "grpo_guard", "nft", "awm", "dpo", "online_sft")
SFT = "sft"
REWARDS = (
    "ocr",
    "jpeg_size",
    "brightness",
    "sharpness",
    "contrast",
    "python",
    "pick_score",
    "hps_v2",
    "image_reward",
    "clip_score",
)
WITH_PATH = REWARDS[5:]
_TRAIN, _HELDOUT = Path("data/prompts/signs_train.txt"), Path("data/prompts/signs_heldout.txt")
_SHARE = 0.9
"""Of the memory; the rest is for what fragments and for other processes."""
_TRIES: tuple[tuple[int, Literal["none", "full"]], ...] = (
    (8, "none"), (4, "none"), (4, "full"), (2, "full"), (1, "full"),
)  # fmt: skip
"""Rows of a tile and trainer.activation_checkpointing, the fastest first."""

Ask = Callable[[str, str], str]
"""(question, what an empty answer means) -> answer."""


@dataclass(frozen=True, kw_only=True)
class Wishes:
    """What was asked for; None: not said."""

    algorithm: str | None = None
    reward: str | None = None
    reward_path: str | None = None
    train: Path | None = None
    """Prompts; SFT has none."""
    heldout: Path | None = None
    data: Path | None = None
    """What SFT learns from."""
    full: bool = False


def run(model: Path, *, out: Path, wishes: Wishes, yes: bool) -> None:
    check_free(out)
    said = answered(wishes, None if yes or not sys.stdin.isatty() else ask_in_terminal)
    with waiting() as tell:
        tell(f"looking at {model}")
        tables, header = _written(model, out, said, tell)
    write_recipe(out, tables, header)
    print("\n".join([f"{out}: {header[0]}", *header[1:]]))
    for path in (said.train, said.heldout):
        if path is not None and not path.exists():
            print(f"verst: {path} does not exist yet; one prompt a line: docs/prompts.md", file=sys.stderr)
    if said.data is not None and not is_there(said.data):
        print(f"verst: {said.data} does not exist yet; docs/data.md says what is looked for", file=sys.stderr)


def _written(model: Path, out: Path, said: Wishes, tell: Tell) -> tuple[dict[str, Any], list[str]]:
    """The recipe, and the lines above it."""
    family, defaults, geometry = look(model)
    machine = this_machine()
    notes: list[str] = []
    if said.data is None:
        tables = recipe_tables(model, out.stem, family, defaults, geometry, said, machine)
        if family.num_images:
            notes.append("Prompts of this family name condition images: docs/prompts.md says how.")
    else:
        tables, notes = sft_tables(model, out.stem, family, defaults, geometry, said.data, machine, full=said.full)
        if said.reward:
            tables |= {"rewards": [_reward(said)], "prompts": {"heldout": str(said.heldout)}}
    tables, note = fitted(tables, machine, tell=tell)
    header = [
        f"{family.name} with {said.algorithm}, written by verst init. {machine}",
        note,
        f"Look at it first: verst plan {out}; verst doctor {out}. Then: verst train {out}",
        *notes,
    ]
    return tables, header


def answered(wishes: Wishes, ask: Ask | None) -> Wishes:
    """With every value there: as said, or answered, or the default. Raises ConfigError for what there is not."""

    def choose(question: str, said: str | None, default: str) -> str:
        return said or (ask(question, default) if ask else default)

    known = (*ALGORITHMS, SFT)
    algorithm = choose(f"Algorithm ({', '.join(known)})", wishes.algorithm, SFT if wishes.data else "flow_grpo")
    _check("--algorithm", algorithm, known)
    if algorithm == SFT:
        return _answered_sft(wishes, ask)
    if wishes.data is not None:
        raise ConfigError(f"--data {wishes.data} is for {SFT}: {algorithm} learns from prompts, which --train names")
    reward = choose(f"Reward ({', '.join(REWARDS)})", wishes.reward, "ocr")
    path = _reward_path(wishes, reward, ask)
    train = Path(choose("File of prompts to train on", _text(wishes.train), str(_TRAIN)))
    heldout = Path(choose("File of held-out prompts", _text(wishes.heldout), str(_HELDOUT)))
    return replace(wishes, algorithm=algorithm, reward=reward, reward_path=path, train=train, heldout=heldout)


def _answered_sft(wishes: Wishes, ask: Ask | None) -> Wishes:
    """A reward is of held-out samples, which need prompts; without one the held-out loss is what is measured."""
    if wishes.train is not None:
        raise ConfigError(f"--train {wishes.train} is for prompts: {SFT} learns from --data, files with captions")
    what = "a folder, a .jsonl, .csv or .parquet table, or .tar shards"
    data = wishes.data or (ask(f"Pictures or clips with captions: {what}", "") if ask else "")
    if not data:
        raise ConfigError(
            f"--algorithm {SFT} needs --data: {what} of pictures or clips with captions, see docs/data.md"
        )
    reward = wishes.reward or (
        ask(f"Reward of held-out samples (none, {', '.join(REWARDS)})", "none") if ask else "none"
    )
    said = replace(wishes, algorithm=SFT, data=Path(data), reward=None)
    if reward == "none":
        if wishes.heldout is not None:
            raise ConfigError(f"--heldout {wishes.heldout} is for prompts that a reward judges; name one with --reward")
        return said
    path = _reward_path(wishes, reward, ask)
    heldout = wishes.heldout or Path(ask("File of held-out prompts", str(_HELDOUT)) if ask else _HELDOUT)
    return replace(said, reward=reward, reward_path=path, heldout=heldout)


def _reward_path(wishes: Wishes, reward: str, ask: Ask | None) -> str | None:
    """Raises ConfigError for a reward that there is not, and where one needs a path."""
    _check("--reward", reward, REWARDS)
    if reward not in WITH_PATH or wishes.reward_path is not None:
        return wishes.reward_path
    what = "module:function" if reward == "python" else "folder of the reward's model"
    path = ask(f"Its {what}", "") if ask else ""
    if not path:
        raise ConfigError(f"--reward {reward} needs --reward-path: the {what}, see docs/rewards.md")
    return path


def _check(option: str, value: str, known: Sequence[str]) -> None:
    if value not in known:
        raise ConfigError(f"{option} {value} is none that verst init writes; there are: {', '.join(known)}")


def ask_in_terminal(question: str, default: str) -> str:
    import typer

    return str(typer.prompt(question, default=default or None))


def recipe_tables(
    model: Path,
    name: str,
    family: Family,
    defaults: SamplingDefaults,
    geometry: Geometry,
    said: Wishes,
    machine: Machine,
) -> dict[str, Any]:
    """The recipe before its sizes are fitted. said: as `answered` returns it."""
    steps = min(10, defaults.num_steps)
    sampling = size_table(geometry) | {"num_steps": steps}
    recorded = said.algorithm in ("flow_grpo", "grpo_guard")
    if recorded:
        window = {"type": "window", "size": min(2, max(1, steps // 2)), "low": 0, "high": max(2, steps // 2)}
        sampling |= {
            "guidance_scale": defaults.guidance_scale,
            "transition": {"type": "sde", "eta": 0.7},
            "steps": window,
        }
    else:
        from verst.families.base import without_guidance

        sampling |= {"guidance_scale": without_guidance(family), "steps": {"type": "none"}}
    algorithm: dict[str, Any] = {"type": said.algorithm}
    if said.algorithm == "nft":
        algorithm["beta"] = 0.1 if said.reward == "ocr" else 1.0
    if said.algorithm == "dpo" and said.full:
        algorithm["reference"] = {"type": "frozen"}
    # The largest power of two divides the microgroups of a rollout.
    ranks = 1 << max(machine.gpus, 1).bit_length() - 1
    several = {"placement": {"type": "colocated"}}
    return {
        "run": {
            "name": run_name(name),
            "iterations": 200,
            "deterministic": machine.gpus == 0,
        },
        "model": model_table(model, defaults, machine, full=said.full),
        "sampling": sampling,
        "prompts": {"train": str(said.train), "heldout": str(said.heldout)},
        "rollout": {"num_groups": 8, "group_size": 16, "microgroup_size": 8},
        "rewards": [_reward(said)],
        "algorithm": algorithm,
        "trainer": {"ranks": ranks, "tile_size": 8, "lr": 1e-5 if said.full else 1e-4 if geometry.num_frames > 1 else 3e-4},
        "engine": {"num": ranks, "max_batch": 8},
        "eval": {"every": 20, "num_prompts": 32, "batch_size": 8},
        **({"cluster": several} if ranks > 1 else {}),
    }  # fmt: skip


def fitted(tables: dict[str, Any], machine: Machine, *, tell: Tell | None = None) -> tuple[dict[str, Any], str]:
    """Batches as large as a trainer rank and an engine beside it can take, and a sentence on how that was found."""
    from verst.loops.memory_plan import memory_plan
    from verst.trainer.estimate import peak_of

    who = "It takes" if tables["algorithm"]["type"] == SFT else "A rank and its engine take"
    smallest = 2 if tables["algorithm"]["type"] == "dpo" else 1
    tried, needed = sized(tables, 4, "full"), 0
    for rows, checkpointing in _TRIES:
        if rows < smallest:
            continue
        tried = sized(tables, rows, checkpointing)
        if tell is not None:
            tell(
                f"the memory of {rows} rows a tile"
                + (", with activation checkpointing" if checkpointing != "none" else "")
            )
        try:
            plan = memory_plan(parse_recipe(tried))
        except (VerstError, RuntimeError) as error:  # RuntimeError: a size that the model itself cannot take
            why = str(error).splitlines()[0]
            return sized(tables, 4, "full"), f"Batches are a guess, for their memory could not be told: {why}"
        needed = peak_of(plan.trainer) + peak_of(plan.engine)
        if needed <= _SHARE * machine.memory:
            return tried, f"{who} about {gib(needed)} by verst plan --memory."
    return tried, (
        f"{who} about {gib(needed)} even so: more than there is. docs/memory.md says what frees some; "
        "trainer.offload, more GPUs, or a smaller size are next."
    )


def sized(tables: dict[str, Any], rows: int, checkpointing: str) -> dict[str, Any]:
    """With `rows` samples in a tile, a microgroup and a batch of the engine alike."""
    sizes: dict[str, dict[str, Any]] = {
        "rollout": {"microgroup_size": rows},
        "trainer": {"tile_size": rows, "activation_checkpointing": checkpointing},
        "engine": {"max_batch": rows},
        "eval": {"batch_size": rows},
    }
    return {key: {**table, **sizes[key]} if key in sizes else table for key, table in tables.items()}


def _reward(said: Wishes) -> dict[str, Any]:
    if said.reward == "ocr":
        return {"type": "ocr", "mode": "scene", "target": "quoted" if _quotes(said.train or said.heldout) else "prompt"}
    if said.reward in WITH_PATH:
        return {"type": said.reward, "path": said.reward_path}
    return {"type": said.reward}


def _quotes(path: Path | None) -> bool:
    """Most prompts say in quotes what is to be written; also where the file is still to come."""
    from verst.rollout.prompts import read_prompts

    if path is None or not path.exists():
        return True
    prompts = read_prompts(path)
    return 2 * sum('"' in prompt.text for prompt in prompts) > len(prompts)


def _text(path: Path | None) -> str | None:
    return None if path is None else str(path)
