"""Small checkpoints in the real diffusers layout, built from nothing in a second or two, without a network.

`build_tiny` makes random ones for tests: no head is zero, so velocities are not, and another prompt gives another
picture. `build_glyphs` makes the untrained model that `recipes/glyphs_sft.toml` teaches to write.
"""

from __future__ import annotations

from pathlib import Path

import torch
from diffusers import ModularPipeline

from verst.errors import ConfigError
from verst.families.tiny import (
    cosmos3,
    cosmos_predict2,
    flux1,
    flux2,
    hunyuan_video,
    krea2,
    ltx2,
    minimax_h3,
    qwen_image,
    qwen_image_21,
    sana,
    sd3,
    wan,
    z_image,
)
from verst.families.tiny.spec import Build, Tiny

TINY: dict[str, Tiny] = {
    **cosmos_predict2.TINY,
    **minimax_h3.TINY,
    **flux1.TINY,
    **flux2.TINY,
    **cosmos3.TINY,
    **sana.TINY,
    **z_image.TINY,
    **hunyuan_video.TINY,
    **krea2.TINY,
    **ltx2.TINY,
    **qwen_image.TINY,
    **qwen_image_21.TINY,
    **sd3.TINY,
    **wan.TINY,
}
"""Name -> its small checkpoint; a new family adds its own here, and every test of the matrix picks it up."""

__all__ = ["TINY", "Tiny", "build_glyphs", "build_tiny"]


def build_tiny(name: str, folder: Path, *, seed: int = 0) -> Path:
    """Write the tiny random checkpoint `name` (a key of TINY, e.g. "sd3") into `folder`, in fp32, and return the folder.

    The same seed gives the same weights; torch's own random state is left as it was. Raises ConfigError.
    """
    if name not in TINY:
        raise ConfigError(f"no tiny checkpoint is called {name!r}; there are: {', '.join(sorted(TINY))}")
    return _save(TINY[name].build, folder, seed)


def build_glyphs(folder: Path, *, size: str = "small", seed: int = 0) -> Path:
    """Write the untrained glyph model ("small": 1.3 M transformer parameters, "big": 3.5 M) and return the folder.

    Train and sample it with 32x64 pixels and `max_sequence_length = 8`. Raises ConfigError.
    """
    if size not in sd3.GLYPH_SIZES:
        raise ConfigError(f"no glyph model is of size {size!r}; there are: {', '.join(sd3.GLYPH_SIZES)}")
    return _save(lambda: sd3.glyphs_sd3(sd3.GLYPH_SIZES[size]), folder, seed)


def _save(build: Build, folder: Path, seed: int) -> Path:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        pipeline = build()
    modular = isinstance(pipeline, ModularPipeline)
    pipeline.save_pretrained(str(folder), **({"overwrite_modular_index": True} if modular else {}))
    return folder
