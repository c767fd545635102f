"""`verst init`: a recipe for a model folder, with sizes that fit the machine."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from verst.cli.recipe_text import check_free, run_name, write_recipe
from verst.config import RlRecipe, parse_recipe
from verst.errors import ConfigError, RequestError, VerstError

if TYPE_CHECKING:
    from verst.families import Family, Geometry, SamplingDefaults

ALGORITHMS = ("flow_grpo", "grpo_guard", "nft", "awm", "dpo", "online_sft")
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
_SIDE = 512
"""Pixels of an image, at most: published runs train at this size."""
_FRAMES = 5
"""Of a clip, at most: as short as they come, which every video family here can make."""
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
    heldout: Path | None = None
    full: bool = False


@dataclass(frozen=True, kw_only=True)
class Machine:
    gpus: int
    memory: int
    """Bytes of one GPU; without GPUs, of the host that are free."""


def run(model: Path, *, out: Path, wishes: Wishes, yes: bool) -> None:
    check_free(out)
    said = answered(wishes, None if yes or not sys.stdin.isatty() else ask_in_terminal)
    family, defaults, geometry = look(model)
    machine = this_machine()
    tables = recipe_tables(model, out.stem, family, defaults, geometry, said, machine)
    tables, note = fitted(tables, machine)
    header = [
        f"{family.name} with {said.algorithm}, written by verst init. {_where(machine)}",
        note,
        f"Look at it first: verst plan {out}; verst doctor {out}. Then: verst train {out}",
    ]
    if family.num_images:
        header.append("Prompts of this family name condition images: docs/prompts.md says how.")
    write_recipe(out, tables, header)
    print("\n".join([f"{out}: {header[0]}", *header[1:]]))
    for path in (said.train, said.heldout):
        if path is not None and not path.exists():
            print(f"verst: {path} does not exist yet; one prompt a line: docs/prompts.md", file=sys.stderr)


def answered(wishes: Wishes, ask: Ask | None) -> Wishes:
    """With every value there: as said, or answered, or the default. Raises ConfigError for what there is not."""

    def choose(question: str, said: str | None, default: str) -> str:
        return said or (ask(question, default) if ask else default)

    algorithm = choose(f"Algorithm ({', '.join(ALGORITHMS)})", wishes.algorithm, "flow_grpo")
    reward = choose(f"Reward ({', '.join(REWARDS)})", wishes.reward, "ocr")
    for option, value, known in (("--algorithm", algorithm, ALGORITHMS), ("--reward", reward, REWARDS)):
        if value not in known:
            raise ConfigError(f"{option} {value} is none that verst init writes; there are: {', '.join(known)}")
    path = wishes.reward_path
    if reward in WITH_PATH and path is None:
        what = "module:function" if reward == "python" else "folder of the reward's model"
        path = ask(f"Its {what}", "") if ask else ""
        if not path:
            raise ConfigError(f"--reward {reward} needs --reward-path: the {what}, see docs/rewards.md")
    train = Path(choose("File of prompts to train on", _text(wishes.train), str(_TRAIN)))
    heldout = Path(choose("File of held-out prompts", _text(wishes.heldout), str(_HELDOUT)))
    return replace(wishes, algorithm=algorithm, reward=reward, reward_path=path, train=train, heldout=heldout)


def ask_in_terminal(question: str, default: str) -> str:
    import typer

    return str(typer.prompt(question, default=default or None))


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
    sampling: dict[str, Any] = {"height": geometry.height, "width": geometry.width}
    if geometry.num_frames > 1:
        sampling["num_frames"] = geometry.num_frames
    sampling["num_steps"] = steps
    recorded = said.algorithm in ("flow_grpo", "grpo_guard")
    if recorded:
        window = {"type": "window", "size": min(2, max(1, steps // 2)), "low": 0, "high": max(2, steps // 2)}
        sampling |= {
            "guidance_scale": defaults.guidance_scale,
            "transition": {"type": "sde", "eta": 0.7},
            "steps": window,
        }
    else:
        sampling["steps"] = {"type": "none"}
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
        "model": {
            "path": str(model),
            "dtype": "bfloat16" if machine.gpus else "float32",
            "max_sequence_length": defaults.max_sequence_length,
            "finetune": {"type": "full"} if said.full else {"type": "lora", "rank": 32, "alpha": 64},
        },
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


def fitted(tables: dict[str, Any], machine: Machine) -> tuple[dict[str, Any], str]:
    """Batches as large as a trainer rank and an engine beside it can take, and a sentence on how that was found."""
    from verst.loops.memory_plan import memory_plan
    from verst.trainer.estimate import peak_of

    smallest = 2 if tables["algorithm"]["type"] == "dpo" else 1
    tried, needed = sized(tables, 4, "full"), 0
    for rows, checkpointing in _TRIES:
        if rows < smallest:
            continue
        tried = sized(tables, rows, checkpointing)
        recipe = parse_recipe(tried)
        assert isinstance(recipe, RlRecipe)
        try:
            plan = memory_plan(recipe)
        except (VerstError, RuntimeError) as error:  # RuntimeError: a size that the model itself cannot take
            why = str(error).splitlines()[0]
            return sized(tables, 4, "full"), f"Batches are a guess, for their memory could not be told: {why}"
        needed = peak_of(plan.trainer) + peak_of(plan.engine)
        if needed <= _SHARE * machine.memory:
            return tried, f"A rank and its engine take about {_gib(needed)} by verst plan --memory."
    return tried, (
        f"A rank and its engine take about {_gib(needed)} even so: more than there is. docs/memory.md says what frees some; "
        "trainer.offload, more GPUs, or a smaller size are next."
    )


def sized(tables: dict[str, Any], rows: int, checkpointing: str) -> dict[str, Any]:
    """With `rows` samples in a tile, a microgroup and a batch of the engine alike."""
    return {
        **tables,
        "rollout": {**tables["rollout"], "microgroup_size": rows},
        "trainer": {**tables["trainer"], "tile_size": rows, "activation_checkpointing": checkpointing},
        "engine": {**tables["engine"], "max_batch": rows},
        "eval": {**tables["eval"], "batch_size": rows},
    }


def _reward(said: Wishes) -> dict[str, Any]:
    if said.reward == "ocr":
        return {"type": "ocr", "mode": "scene", "target": "quoted" if _quotes(said.train) else "prompt"}
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


def _where(machine: Machine) -> str:
    if machine.gpus:
        return f"For {machine.gpus} GPU{'s' if machine.gpus > 1 else ''} of {_gib(machine.memory)}."
    return f"For processors alone, with {_gib(machine.memory)} of memory free."


def _gib(number: int) -> str:
    return f"{number / 2**30:.1f} GiB"


def _text(path: Path | None) -> str | None:
    return None if path is None else str(path)
