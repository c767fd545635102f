"""The commands of who begins: is the machine fit, and which recipe to start from."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from verst.cli.options import AsJson


def add_commands(app: typer.Typer) -> None:
    app.command()(doctor)
    app.command()(init)
    app.command()(recipes)
    app.command("convert-recipe")(convert_recipe)
    app.command()(completion)


def doctor(
    target: Annotated[
        Path | None,
        typer.Argument(
            metavar="[MODEL_OR_RECIPE]", help="Also: is this model folder whole, does this recipe fit here."
        ),
    ] = None,
    as_json: AsJson = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="Only what is amiss.")] = False,
) -> None:
    """Check Python, packages, GPUs, disk, shared memory, limits and ports, and say what to do; exits 1 where one fails."""
    from verst.cli import doctor as command

    if not command.run(target, as_json=as_json, quiet=quiet):
        raise typer.Exit(1)


def init(
    model: Annotated[Path, typer.Argument(help="A model folder in the diffusers layout.")],
    out: Annotated[Path, typer.Option(help="The recipe to write; must not exist.")] = Path("recipe.toml"),
    algorithm: Annotated[
        str | None, typer.Option(help="flow_grpo, grpo_guard, nft, awm, dpo, online_sft, sft.")
    ] = None,
    reward: Annotated[
        str | None, typer.Option(help="ocr, jpeg_size, pick_score, python, ...: docs/rewards.md.")
    ] = None,
    reward_path: Annotated[
        str | None, typer.Option(help="The reward's model folder; of python, module:function.")
    ] = None,
    train: Annotated[Path | None, typer.Option(help="Prompts to train on.")] = None,
    heldout: Annotated[Path | None, typer.Option(help="Prompts that are only evaluated.")] = None,
    data: Annotated[
        Path | None, typer.Option(help="Of sft: a folder, table or .tar shards of pictures or clips with captions.")
    ] = None,
    full: Annotated[bool, typer.Option(help="Train all weights instead of a LoRA.")] = False,
    yes: Annotated[bool, typer.Option(help="Ask nothing; what is not said takes its default.")] = False,
) -> None:
    """Write a recipe for a model folder: its family, and sizes that fit this machine. Asks for what was not said."""
    from verst.cli import init as command

    wishes = command.Wishes(
        algorithm=algorithm, reward=reward, reward_path=reward_path, train=train, heldout=heldout, data=data, full=full
    )
    command.run(model, out=out, wishes=wishes, yes=yes)


def recipes(
    name: Annotated[str | None, typer.Argument(help="Print this one, e.g. to redirect it into a file.")] = None,
    as_json: AsJson = False,
) -> None:
    """List the recipes that come with verst: algorithm, model, what each needs and gives; or print one."""
    from verst.cli import recipes as command

    command.run(name, as_json=as_json)


def convert_recipe(
    file: Annotated[
        Path, typer.Argument(help="flow_grpo's config as JSON or key = value lines, or miles_diffusion's --flag value.")
    ],
    out: Annotated[Path, typer.Option(help="The recipe to write; must not exist.")] = Path("recipe.toml"),
    gpus: Annotated[
        int | None, typer.Option(min=1, help="GPUs of the flow_grpo run, whose batches are a GPU's; unset = 1.")
    ] = None,
) -> None:
    """Write a recipe from another trainer's settings, naming what was assumed and what has no counterpart."""
    from verst.cli import convert as command

    command.run(file, out=out, gpus=gpus)


def completion(shell: Annotated[Literal["bash", "zsh", "fish"], typer.Argument(help="Of which shell.")]) -> None:
    """Print the script that completes commands and options: bash: `source <(verst completion bash)` in ~/.bashrc."""
    from typer.completion import get_completion_script  # type: ignore[attr-defined]

    print(get_completion_script(prog_name="verst", complete_var="_VERST_COMPLETE", shell=shell))
