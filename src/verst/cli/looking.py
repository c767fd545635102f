"""The commands of who has a model or a run already: what it gives, where its time went, whether it can be made again."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from verst.cli.options import AsJson, Checkpoint, Ema, Overrides, Quiet, RunFolder


def add_commands(app: typer.Typer) -> None:
    app.command("eval")(evaluate)
    app.command()(generate)
    app.command()(export)
    app.command()(replay)
    app.command("explain-ratio")(explain_ratio)
    app.command()(triage)
    app.command()(trace)
    app.command()(dashboard)


def evaluate(
    run: Annotated[Path, typer.Argument(help="A run folder, or a recipe (then its untrained model).")],
    overrides: Overrides = None,
    checkpoint: Checkpoint = "newest",
    ema: Ema = False,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Held-out reward of a checkpoint, in this process."""
    from verst.cli import models

    models.evaluate(run, overrides or [], checkpoint=checkpoint, ema=ema, as_json=as_json, quiet=quiet)


def generate(
    model: Annotated[Path, typer.Argument(help="A model folder in the diffusers layout, or a run folder.")],
    prompts: Annotated[list[str], typer.Argument(help="One picture or clip each.")],
    out: Annotated[Path, typer.Option(help="Folder for the files: PNG, of clips WebM.")] = Path("generated"),
    seed: Annotated[int, typer.Option(help="Noise of the first picture; the next ones count up.")] = 0,
    height: Annotated[int | None, typer.Option(help="Pixels; unset = the run's or the model's own.")] = None,
    width: Annotated[int | None, typer.Option(help="Pixels; unset = the run's or the model's own.")] = None,
    frames: Annotated[int | None, typer.Option(help="Of a clip; unset = the run's or the model's own.")] = None,
    fps: Annotated[float | None, typer.Option(help="Frames a second of a clip.")] = None,
    steps: Annotated[int | None, typer.Option(help="Denoising steps.")] = None,
    guidance: Annotated[float | None, typer.Option(help="Guidance scale; at most 1 = off.")] = None,
    max_sequence_length: Annotated[int | None, typer.Option(help="Tokens of the long text encoder.")] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda or auto.")] = "auto",
    checkpoint: Checkpoint = "newest",
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Make pictures or clips with a model folder or with what a run has learned."""
    from verst.cli import models

    sampling = {
        "height": height,
        "width": width,
        "num_frames": frames,
        "fps": fps,
        "num_inference_steps": steps,
        "guidance_scale": guidance,
        "max_sequence_length": max_sequence_length,
    }
    models.generate(
        model,
        prompts,
        out=out,
        seed=seed,
        device=device,
        sampling=sampling,
        checkpoint=checkpoint,
        as_json=as_json,
        quiet=quiet,
    )


def export(
    run: RunFolder,
    out: Annotated[Path, typer.Argument(help="Folder to write; must not exist.")],
    what: Annotated[
        Literal["auto", "lora", "pipeline"],
        typer.Option(help="lora: pytorch_lora_weights.safetensors; pipeline: a whole model folder, LoRA merged."),
    ] = "auto",
    checkpoint: Checkpoint = "newest",
    ema: Ema = False,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Write a checkpoint as a LoRA or a pipeline that plain diffusers loads."""
    from verst.cli import models

    models.export(run, out, what=what, checkpoint=checkpoint, ema=ema, as_json=as_json, quiet=quiet)


def replay(
    run: RunFolder,
    iteration: Annotated[
        int | None, typer.Option(help="Which to make again, from the newest checkpoint before it; unset = the newest.")
    ] = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Make recorded iterations again and compare metrics and weights bit for bit; exits 1 where they differ."""
    from verst.cli import replay as command

    command.run(run, iteration, as_json=as_json, quiet=quiet)


def explain_ratio(
    run: RunFolder,
    iteration: Annotated[int, typer.Argument(help="From 1; a checkpoint of the iteration before must be kept.")],
    sample: Annotated[str, typer.Argument(help="GROUP.INDEX, both from 0.")],
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Make one sample again in engine and trainer, and name the first block and tensor that differ."""
    from verst.cli import explain as command

    command.run(run, iteration, sample, as_json=as_json, quiet=quiet)


def triage(
    run: Annotated[Path, typer.Argument(help="A run folder, of a run that may still go on.")],
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Say where a run's time went, what bounds it, and which knobs of its recipe would save how much."""
    from verst.cli import timing as command

    command.triage(run, as_json=as_json, quiet=quiet)


def trace(
    run: RunFolder,
    out: Annotated[Path | None, typer.Option(help="File to write; unset = trace.json in the run folder.")] = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Write a run's spans as a trace that ui.perfetto.dev shows: engines, parsers, reward workers, trainer, driver."""
    from verst.cli import timing as command

    command.trace(run, out, as_json=as_json, quiet=quiet)


def dashboard(
    runs: Annotated[list[Path], typer.Argument(help="Run folders, or folders of them such as runs/.")],
    host: Annotated[
        str, typer.Option(help="Address to listen on; elsewhere than on loopback VERST_TOKEN must be set.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="0 = any free one.")] = 8080,
    export: Annotated[
        Path | None, typer.Option(help="Write the page as this one HTML file instead, to mail or keep.")
    ] = None,
    max_mb: Annotated[float, typer.Option(help="Of that file, at most; samples are left out beyond.")] = 20.0,
    quiet: Quiet = False,
) -> None:
    """Look at runs, live, in a browser: curves, samples, who did what when, alarms, recipes side by side."""
    from verst.cli import dashboard as command

    command.run(runs, host=host, port=port, export=export, max_mb=max_mb, quiet=quiet)
