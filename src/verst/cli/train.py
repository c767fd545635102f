"""`verst train`."""

from __future__ import annotations

import asyncio
import sys

from verst.cli.options import waiting
from verst.config.recipe import Recipe


def run(recipe: Recipe, *, if_complete: str, quiet: bool) -> None:
    """Dispatch to the loop of the recipe; a complete run says so and is left alone unless `if_complete` is new."""
    with waiting(quiet=quiet) as tell:
        tell("starting")
        from verst.loops.run_folder import RunFolder
        from verst.loops.start import load_loop, run_recipe

        load_loop(recipe)
    folder = RunFolder(recipe, if_complete="new" if if_complete == "new" else "summary")
    try:
        summary = folder.summary()
        if summary is None:
            run_recipe(recipe, folder, quiet=quiet)
        elif not quiet:
            before, after = summary["heldout_before"], summary["heldout_after"]
            # None where no held-out sample ever had a score.
            heldout = "" if before is None else f", held-out reward {before:.3f} -> {after:.3f}"
            why = f" (ended by the watch: {summary['why']})" if summary.get("why") else ""
            further = "another [watch]" if summary["early"] else "a larger run.iterations"
            print(
                f"{folder.path} is complete: {summary['iterations']} iterations{heldout}{why}. `--if-complete new` starts it "
                f"anew (this one is kept beside it); {further} goes on."
            )
    except asyncio.CancelledError:
        print("stopped at once; the same command goes on from the last checkpoint", file=sys.stderr)
        sys.exit(130)
    finally:
        folder.close()
