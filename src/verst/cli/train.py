"""`verst train`."""

from __future__ import annotations

import asyncio
import sys

from verst.config.recipe import Recipe, SftRecipe


def run(recipe: Recipe, *, if_complete: str, quiet: bool) -> None:
    """Dispatch to the loop of the recipe; a complete run says so and is left alone unless `if_complete` is new."""
    if isinstance(recipe, SftRecipe):
        from verst.loops.sft import train_sft

        train_sft(recipe)
        return
    from verst.loops.rl import train_rl
    from verst.loops.run_folder import RunFolder

    folder = RunFolder(recipe, if_complete="new" if if_complete == "new" else "summary")
    summary = folder.summary()
    if summary is not None:
        if not quiet:
            before, after = summary["heldout_before"], summary["heldout_after"]
            print(
                f"{folder.path} is complete: {summary['iterations']} iterations, held-out reward "
                f"{before:.3f} -> {after:.3f}. `--if-complete new` starts it anew (this one is kept beside it); a larger "
                "run.iterations goes on."
            )
        return
    try:
        asyncio.run(train_rl(recipe, folder, quiet=quiet))
    except asyncio.CancelledError:
        print("stopped at once; the same command goes on from the last checkpoint", file=sys.stderr)
        sys.exit(130)
    finally:
        folder.close()
