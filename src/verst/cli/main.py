"""`verst`: doctor, init, recipes, convert-recipe, train, plan, replay, chaos, explain-ratio, trace, triage, eval, generate, serve, router, export,
dashboard, tiny, bench, completion."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated, Any, Literal

# Read when torch is imported, here and in every process that we start: waiting threads must sleep, not spin.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("GOMP_SPINCOUNT", "0")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
# Their notices and bars are not ours to show; errors come through.
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("DIFFUSERS_VERBOSITY", "error")
os.environ.setdefault("TQDM_DISABLE", "1")
# Ray's notice about the accelerator variables it may change one day; we set none.
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")

import typer

from verst.cli import starting, usage
from verst.errors import VerstError

RecipePath = Annotated[Path, typer.Argument(help="Recipe in TOML.", show_default=False)]
Overrides = Annotated[
    list[str] | None, typer.Argument(help="Changes to the recipe: section.key=value.", show_default=False)
]

Checkpoint = Annotated[str, typer.Option(help="newest, best, or an iteration, e.g. 40.")]

_GPUS = ",".join(str(2**n) for n in range(11))

app = typer.Typer(
    name="verst",
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
)


def main() -> None:
    """Errors that a person can mend are one paragraph; a traceback only with --debug, wherever it stands."""
    arguments = [word for word in sys.argv[1:] if word != "--debug"]
    debug = len(arguments) < len(sys.argv) - 1 or bool(os.environ.get("VERST_DEBUG"))
    try:
        # What `typer.Exit` carried, and nothing where a command came to its end.
        sys.exit(app(args=arguments, prog_name="verst", standalone_mode=False))
    except typer.Abort:
        print("verst: stopped at a question; nothing was written", file=sys.stderr)
        sys.exit(1)
    except usage.UsageError as error:
        print(usage.usage_paragraph(error, arguments), end="", file=sys.stderr)
        sys.exit(2)
    except (VerstError, OSError) as error:
        if debug:
            raise
        print(f"verst: {type(error).__name__}: {error}", file=sys.stderr)
        sys.exit(2)


@app.callback()
def everywhere(debug: Annotated[bool, typer.Option("--debug", help="Errors with their traceback.")] = False) -> None:
    """Post-training of diffusion models: SFT, Flow-GRPO, DiffusionNFT, on a laptop or a Ray cluster."""


@app.command()
def train(
    recipe: RecipePath,
    overrides: Overrides = None,
    if_complete: Annotated[
        Literal["summary", "new"], typer.Option(help="When the run is complete already: say so, or start it anew.")
    ] = "summary",
    quiet: Annotated[bool, typer.Option(help="Print nothing.")] = False,
) -> None:
    """Run a recipe, or go on with it: the same command continues after any interruption."""
    from verst.cli import train as command

    command.run(_load(recipe, overrides), if_complete=if_complete, quiet=quiet)


@app.command()
def plan(
    recipe: RecipePath,
    overrides: Overrides = None,
    steps: Annotated[bool, typer.Option(help="Also the model's sigma grid: loads its scheduler, no weights.")] = False,
    memory: Annotated[
        bool, typer.Option(help="Also the memory of a trainer rank and of an engine: traces shapes, reads no weights.")
    ] = False,
    simulate: Annotated[
        bool, typer.Option(help="Instead: how long an iteration takes, and what to have how many of, by simulation.")
    ] = False,
    source: Annotated[
        Path | None, typer.Option("--from", help="With --simulate: a run folder, whose spans say what stages take.")
    ] = None,
    times: Annotated[Path | None, typer.Option(help="With --simulate: a TOML that says so, docs/scaling.md.")] = None,
    gpus: Annotated[str, typer.Option(help="With --simulate: numbers of GPUs to plan for.")] = _GPUS,
    as_json: Annotated[bool, typer.Option("--json", help="With --simulate: JSON in place of tables.")] = False,
) -> None:
    """Print the resolved recipe, its batch arithmetic and its processes. Loads no model."""
    from verst.cli import plan as command

    if simulate:
        command.print_simulation(
            _load(recipe, overrides, model=False), source=source, times=times, gpus=gpus, as_json=as_json
        )
        return
    loaded = _load(recipe, overrides, model=steps or memory)
    command.run(loaded)
    if memory:
        command.print_memory(loaded)
    if steps:
        command.print_steps(loaded)


@app.command("eval")
def evaluate(
    run: Annotated[Path, typer.Argument(help="A run folder, or a recipe (then its untrained model).")],
    overrides: Overrides = None,
    checkpoint: Checkpoint = "newest",
    ema: Annotated[bool, typer.Option(help="Use the moving average of the weights.")] = False,
) -> None:
    """Held-out reward of a checkpoint, in this process."""
    from verst.cli import models

    models.evaluate(run, overrides or [], checkpoint=checkpoint, ema=ema)


@app.command()
def replay(
    run: Annotated[Path, typer.Argument(help="A run folder.")],
    iteration: Annotated[
        int | None, typer.Option(help="Which to make again, from the newest checkpoint before it; unset = the newest.")
    ] = None,
) -> None:
    """Make recorded iterations again and compare metrics and weights bit for bit; exits 1 where they differ."""
    from verst.cli import replay as command

    command.run(run, iteration)


@app.command("explain-ratio")
def explain_ratio(
    run: Annotated[Path, typer.Argument(help="A run folder.")],
    iteration: Annotated[int, typer.Argument(help="From 1; a checkpoint of the iteration before must be kept.")],
    sample: Annotated[str, typer.Argument(help="GROUP.INDEX, both from 0.")],
) -> None:
    """Make one sample again in engine and trainer, and name the first block and tensor that differ."""
    from verst.cli import explain as command

    command.run(run, iteration, sample)


@app.command()
def trace(
    run: Annotated[Path, typer.Argument(help="A run folder.")],
    out: Annotated[Path | None, typer.Option(help="File to write; unset = trace.json in the run folder.")] = None,
) -> None:
    """Write a run's spans as a trace that ui.perfetto.dev shows: engines, parsers, reward workers, trainer, driver."""
    from verst.cli import timing as command

    command.trace(run, out)


@app.command()
def triage(
    run: Annotated[Path, typer.Argument(help="A run folder, of a run that may still go on.")],
    json: Annotated[bool, typer.Option("--json", help="As JSON.")] = False,
) -> None:
    """Say where a run's time went, what bounds it, and which knobs of its recipe would save how much."""
    from verst.cli import timing as command

    command.triage(run, as_json=json)


@app.command()
def chaos(
    recipe: RecipePath,
    overrides: Overrides = None,
    seed: Annotated[int, typer.Option(help="Of the schedule of faults.")] = 0,
    faults: Annotated[int, typer.Option(help="Kills, pauses, hangs and delays.")] = 10,
    kinds: Annotated[
        list[str] | None, typer.Option(help="engine, trainer, parser, reward, driver; unset = all. May be repeated.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Folder of both runs; unset = a temporary one, kept.")] = None,
    limit_s: Annotated[float, typer.Option("--limit", help="Seconds without progress that are a hang.")] = 30.0,
    timeout_s: Annotated[
        float, typer.Option("--timeout", help="Seconds after which no further fault is begun.")
    ] = 3600.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Run a recipe twice, once among random faults, and check that nothing is lost and the weights are the same."""
    from verst.cli import chaos as command

    command.run(
        _load(recipe, overrides),
        recipe,
        overrides or [],
        seed=seed,
        faults=faults,
        kinds=kinds or [],
        out=out,
        limit_s=limit_s,
        timeout_s=timeout_s,
        as_json=as_json,
    )


@app.command()
def generate(
    model: Annotated[Path, typer.Argument(help="A model folder in the diffusers layout, or a run folder.")],
    prompts: Annotated[list[str], typer.Argument(help="One picture each.")],
    out: Annotated[Path, typer.Option(help="Folder for the PNG files.")] = Path("generated"),
    seed: Annotated[int, typer.Option(help="Noise of the first picture; the next ones count up.")] = 0,
    height: Annotated[int | None, typer.Option(help="Pixels; unset = the run's or the model's own.")] = None,
    width: Annotated[int | None, typer.Option(help="Pixels; unset = the run's or the model's own.")] = None,
    steps: Annotated[int | None, typer.Option(help="Denoising steps.")] = None,
    guidance: Annotated[float | None, typer.Option(help="Guidance scale; at most 1 = off.")] = None,
    max_sequence_length: Annotated[int | None, typer.Option(help="Tokens of the long text encoder.")] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda or auto.")] = "auto",
    checkpoint: Checkpoint = "newest",
) -> None:
    """Make pictures with a model folder or with what a run has learned."""
    from verst.cli import models

    sampling = {
        "height": height,
        "width": width,
        "num_inference_steps": steps,
        "guidance_scale": guidance,
        "max_sequence_length": max_sequence_length,
    }
    models.generate(model, prompts, out=out, seed=seed, device=device, sampling=sampling, checkpoint=checkpoint)


@app.command()
def serve(
    model: Annotated[Path, typer.Argument(help="A model folder in the diffusers layout.")],
    host: Annotated[str, typer.Option(help="Address to listen on; beyond this machine only with VERST_TOKEN.")] = (
        "127.0.0.1"
    ),
    port: Annotated[int, typer.Option(help="0 = any free one.")] = 30000,
    dtype: Annotated[Literal["float32", "bfloat16", "float16"], typer.Option()] = "float32",
    fp32_modules: Annotated[
        list[str] | None, typer.Option(help="Module that stays in float32 beside the family's own; once for each.")
    ] = None,
    compile_: Annotated[
        Literal["off", "inductor", "aot_eager"], typer.Option("--compile", help="torch.compile for repeated blocks.")
    ] = "off",
    device: Annotated[str, typer.Option(help="cpu, cuda or auto.")] = "auto",
    deterministic: Annotated[bool, typer.Option(help="One request is one batch.")] = False,
    max_batch: Annotated[int, typer.Option(help="Samples of one batch.")] = 64,
    queue_size: Annotated[int, typer.Option(help="Requests that may wait.")] = 64,
    threads: Annotated[int, typer.Option(help="CPU threads; 0 = all cores.")] = 0,
    files: Annotated[
        list[Path] | None, typer.Option(help="Folder whose files requests may name (images, weights); once for each.")
    ] = None,
) -> None:
    """Serve a model over SGLang-Diffusion's rollout contract."""
    from verst.cli import models

    models.serve(
        model,
        host=host,
        port=port,
        dtype=dtype,
        fp32_modules=tuple(fp32_modules or ()),
        compiled=compile_,
        device=device,
        deterministic=deterministic,
        max_batch=max_batch,
        queue_size=queue_size,
        threads=threads,
        files=files or (),
    )


@app.command()
def router(
    engines: Annotated[list[str] | None, typer.Option(help="Address of an engine; once for each.")] = None,
    host: Annotated[str, typer.Option(help="Address to listen on; beyond this machine only with VERST_TOKEN.")] = (
        "127.0.0.1"
    ),
    port: Annotated[int, typer.Option(help="0 = any free one.")] = 30100,
    max_staleness: Annotated[int, typer.Option(min=0, help="Weight versions that an engine may be behind.")] = 0,
    per_engine: Annotated[int, typer.Option(min=1, help="Requests at one engine at a time; more wait here.")] = 16,
    queue_size: Annotated[int, typer.Option(min=0, help="Requests that may wait.")] = 1024,
    request_timeout_s: Annotated[float, typer.Option(min=0.001, help="Until an answer begins.")] = 900.0,
    probe_s: Annotated[float, typer.Option(min=0.01, help="Between two looks at an engine.")] = 1.0,
) -> None:
    """One address for several engines: least-loaded, by weight version, with recovery (docs/serving.md)."""
    from verst.router.options import RouterOptions
    from verst.router.pool import Policy
    from verst.router.server import serve as serve_router
    from verst.web.guard import token_from_environment

    options = RouterOptions(
        engines=tuple(engines or ()),
        policy=Policy(per_engine=per_engine, max_staleness=max_staleness),
        queue_size=queue_size,
        request_timeout_s=request_timeout_s,
        probe_s=probe_s,
    )
    serve_router(options, host=host, port=port, token=token_from_environment())


@app.command()
def export(
    run: Annotated[Path, typer.Argument(help="A run folder.")],
    out: Annotated[Path, typer.Argument(help="Folder to write; must not exist.")],
    what: Annotated[
        Literal["auto", "lora", "pipeline"],
        typer.Option(help="lora: pytorch_lora_weights.safetensors; pipeline: a whole model folder, LoRA merged."),
    ] = "auto",
    checkpoint: Checkpoint = "newest",
    ema: Annotated[bool, typer.Option(help="Export the moving average of the weights.")] = False,
) -> None:
    """Write a checkpoint as a LoRA or a pipeline that plain diffusers loads."""
    from verst.cli import models

    models.export(run, out, what=what, checkpoint=checkpoint, ema=ema)


@app.command()
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
) -> None:
    """Look at runs, live, in a browser: curves, samples, who did what when, alarms, recipes side by side."""
    from verst.cli import dashboard as command

    command.run(runs, host=host, port=port, export=export, max_mb=max_mb)


@app.command()
def tiny(
    family: Annotated[str, typer.Argument(help="sd3, sd3.5, flux1, wan2.1, ...; a wrong one names them all.")],
    out: Annotated[Path, typer.Argument(help="Folder to write.")],
    seed: Annotated[int, typer.Option(help="Of the random weights.")] = 0,
) -> None:
    """Write a tiny random checkpoint in the real layout, to try things with."""
    from verst.families.tiny import build_tiny

    build_tiny(family, out, seed=seed)
    print(out)


bench = typer.Typer(no_args_is_help=True, help="Measurements and proofs, printed as tables.")
app.add_typer(bench, name="bench")
starting.add_commands(app)


@bench.command()
def matrix(
    families: Annotated[list[str] | None, typer.Argument(help="Tiny checkpoints; unset = all of them.")] = None,
) -> None:
    """Every family x algorithm x {LoRA, full}: one rollout, update and certified sync each, on tiny checkpoints."""
    from verst.loops.matrix import print_matrix

    raise typer.Exit(1 if print_matrix(families or []) else 0)


def _load(recipe: Path, overrides: list[str] | None, *, model: bool = True) -> Any:
    """The recipe, its files there; with `model` its model too, from the hub where a hub id names it."""
    from verst.config import load_recipe
    from verst.loops.start import with_files

    return with_files(load_recipe(recipe, overrides or []), model=model)


if __name__ == "__main__":
    main()
