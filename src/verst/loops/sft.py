"""A supervised run: captions and pictures in, a diffusers pipeline out. One process, no Ray.

files, or drawn text ──> x0 (autoencoder, or the cache on disk) ──┐  a thread makes the next batches meanwhile
captions ──> text encoders (trained too), or the cache ───────────┤
noise eps, level sigma ───────────────────────────────────────────┴─> velocity ──> loss ──> AdamW, EMA
                                     every few steps: held-out loss and reward ──> save, stop

The loss is |v - (eps - x0)|^2 of samples (SFT), or Diffusion-DPO's of preferred and rejected samples.
"""

from __future__ import annotations

from pathlib import Path

from verst.config.supervised import SftRecipe
from verst.loops.run_folder import RunFolder
from verst.loops.sft_run import SftRun
from verst.loops.stop import Asked


def train_sft(recipe: SftRecipe, folder: RunFolder, *, quiet: bool = False, asked: Asked | None = None) -> Path | None:
    """Run to the end or the stop rule; returns the folder of the trained pipeline, `<run folder>/pipeline`.

    asked: may stop it after a step, with a checkpoint; None is returned then.

    The same call on the same folder goes on from its newest checkpoint. Raises ConfigError, ModelError, PromptError,
    DataError or RewardError before any training for what is wrong with the recipe or its files; DataError for a file
    that turns out to be bad under way, unless bad files are skipped; InvariantError when the loss is not finite or the
    stop rule cannot be met.
    """
    with SftRun(recipe, folder, quiet=quiet) as run:
        iteration, stopped = run.start(), False
        with run.batches(iteration) as batches:
            while iteration < recipe.run.iterations and not stopped:
                iteration += 1
                with run.phase("iteration", iteration):
                    with run.phase("wait", iteration):
                        batch = batches.get()
                    with run.phase("train", iteration):
                        metrics = run.trainer.step(run.loss.tiles(batch))
                    stopped = run.after_step(iteration, metrics, batch.metrics)
                if asked is not None and asked.requested and not stopped and iteration < recipe.run.iterations:
                    run.pause(iteration)
                    return None
        return run.end(iteration, stopped=stopped)
