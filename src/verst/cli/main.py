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

from verst.cli import looking, starting, usage
from verst.cli.options import AsJson, Overrides, Quiet, RecipePath, waiting
from verst.errors import ConfigError, VerstError

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
    quiet: Annotated[bool, typer.Option("--quiet", help="Print nothing.")] = False,
) -> None:
    """Run a recipe, or go on with it: the same command continues after any interruption."""
    from verst.cli import train as command

    command.run(_load(recipe, overrides, quiet=quiet), if_complete=if_complete, quiet=quiet)


@app.command()
def plan(
    recipe: RecipePath,
    overrides: Overrides = None,
    steps: Annotated[bool, typer.Option(help="Also the model's sigma grid: loads its scheduler, no weights.")] = False,
    memory: Annotated[
        bool,
        typer.Option(
            help="Also the memory of a trainer rank and of an engine, or of SFT's process: traces shapes, reads no weights."
        ),
    ] = False,
    simulate: Annotated[
        bool, typer.Option(help="Instead: how long an iteration takes, and what to have how many of, by simulation.")
    ] = False,
    source: Annotated[
        Path | None, typer.Option("--from", help="With --simulate: a run folder, whose spans say what stages take.")
    ] = None,
    times: Annotated[Path | None, typer.Option(help="With --simulate: a TOML that says so, docs/scaling.md.")] = None,
    gpus: Annotated[str, typer.Option(help="With --simulate: numbers of GPUs to plan for.")] = _GPUS,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Print the resolved recipe, its batch arithmetic and its processes. Loads no model."""
    from verst.cli import plan as command

    if simulate and (steps or memory):
        raise ConfigError("--simulate prints the simulation alone: leave --steps and --memory out of this call")
    if not simulate and (source is not None or times is not None):
        raise ConfigError("--from and --times say what stages take for --simulate: add it, or leave them out")
    quiet = quiet or as_json
    loaded = _load(recipe, overrides, model=steps or memory, quiet=quiet)
    if simulate:
        command.print_simulation(loaded, source=source, times=times, gpus=gpus, as_json=as_json, quiet=quiet)
    else:
        command.run(loaded, steps=steps, memory=memory, as_json=as_json, quiet=quiet)


@app.command()
def chaos(
    recipe: RecipePath,
    overrides: Overrides = None,
    seed: Annotated[int, typer.Option(help="Of the schedule of faults.")] = 0,
    faults: Annotated[int, typer.Option(help="Kills, pauses, hangs and delays.")] = 10,
    kinds: Annotated[
        list[str] | None,
        typer.Option(help="engine, trainer, parser, reward, driver, router; unset = all of the run. May be repeated."),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Folder of both runs; unset = a temporary one, kept.")] = None,
    limit_s: Annotated[float, typer.Option("--limit", help="Seconds without progress that are a hang.")] = 30.0,
    timeout_s: Annotated[
        float, typer.Option("--timeout", help="Seconds after which no further fault is begun.")
    ] = 3600.0,
    as_json: AsJson = False,
) -> None:
    """Run a recipe twice, once among random faults, and check that nothing is lost and the weights are the same."""
    from verst.cli import chaos as command

    command.run(
        _load(recipe, overrides, quiet=as_json),
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
def tiny(
    family: Annotated[str, typer.Argument(help="sd3, sd3.5, flux1, wan2.1, ...; a wrong one names them all.")],
    out: Annotated[Path, typer.Argument(help="Folder to write.")],
    seed: Annotated[int, typer.Option(help="Of the random weights.")] = 0,
) -> None:
    """Write a tiny random checkpoint in the real layout, to try things with."""

    with waiting() as tell:
        tell(f"building {out}")
        from verst.families.tiny import build_tiny

        build_tiny(family, out, seed=seed)
    print(out)


bench = typer.Typer(no_args_is_help=True, help="Measurements and proofs, printed as tables.")
app.add_typer(bench, name="bench")
looking.add_commands(app)
starting.add_commands(app)


@bench.command()
def matrix(
    families: Annotated[list[str] | None, typer.Argument(help="Tiny checkpoints; unset = all of them.")] = None,
) -> None:
    """Every family x algorithm x {LoRA, full}: one rollout, update and certified sync each, on tiny checkpoints."""
    from verst.loops.matrix import print_matrix

    raise typer.Exit(1 if print_matrix(families or []) else 0)


def _load(recipe: Path, overrides: list[str] | None, *, model: bool = True, quiet: bool = False) -> Any:
    """The recipe, its files there; with `model` its model too, from the hub where a hub id names it."""
    from verst.config import load_recipe
    from verst.loops.start import with_files

    loaded = load_recipe(recipe, overrides or [])
    with waiting(quiet=quiet or not model) as tell:
        tell(f"looking for {loaded.model.path}")
        return with_files(loaded, model=model)


if __name__ == "__main__":
    main()
