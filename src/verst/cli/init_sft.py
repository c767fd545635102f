"""`verst init --algorithm sft`: a recipe that learns from files with captions."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verst.cli.init_parts import Machine, model_table, size_table
from verst.cli.recipe_text import run_name
from verst.config.data import FolderData, ManifestData, WebDatasetData
from verst.errors import DataError

if TYPE_CHECKING:
    from verst.families import Family, Geometry, SamplingDefaults

_SHARDS = ".tar"
_KINDS = {"folder": FolderData, "manifest": ManifestData, "webdataset": WebDatasetData}
_TABLES = (".jsonl", ".csv", ".parquet")
_HELDOUT = 16
"""Items that are only evaluated, at most; of few items a tenth."""
_BATCH = 16


def sft_tables(
    model: Path,
    name: str,
    family: Family,
    defaults: SamplingDefaults,
    geometry: Geometry,
    source: Path,
    machine: Machine,
    *,
    full: bool,
) -> tuple[dict[str, Any], list[str]]:
    """The recipe before its sizes are fitted, and what was found in the source. Raises DataError for one without items."""
    from verst.families.base import ANY_IMAGES

    items, unusable = count_items(source)
    heldout = max(1, min(_HELDOUT, items // 10)) if items else _HELDOUT
    data = source_table(source) | {
        "heldout": heldout,
        "cache": {"folder": str(Path("build") / f"{run_name(name)}_cache")},
    }
    notes = []
    if items:
        bad = f", and {unusable} that cannot be used (data.on_bad_file)" if unusable else ""
        notes.append(
            f"{items} items were found{bad}; {heldout} are held out, and the loss on them is what is measured."
        )
    if family.num_images:
        if geometry.num_frames > 1:
            data["first_frame_as_condition"] = True
        takes = "may take" if family.num_images == ANY_IMAGES else "takes"
        notes.append(f"This family {takes} condition images: docs/data.md says how an item names its own.")
    return {
        "run": {"name": run_name(name), "iterations": 1000, "deterministic": machine.gpus == 0},
        "model": model_table(model, defaults, machine, full=full),
        "sampling": size_table(geometry) | {"num_steps": min(20, defaults.num_steps)},
        "data": data,
        "algorithm": {"type": "sft", "batch_size": _BATCH},
        "trainer": {"tile_size": 8, "lr": 1e-5 if full else 1e-4, "warmup_steps": 20},
        "checkpoint": {"every": 100},
        "eval": {"every": 100, "batch_size": 8},
    }, notes


def is_there(source: Path) -> bool:
    """Of shards their pattern's folder."""
    return (source.parent if _SHARDS in source.name else source).exists()


def source_table(source: Path) -> dict[str, Any]:
    """[data] of what a path is by its name."""
    if _SHARDS in source.name:
        return {"type": "webdataset", "shards": str(source)}
    return {"type": "manifest" if source.suffix in _TABLES else "folder", "path": str(source)}


def count_items(source: Path) -> tuple[int, int]:
    """Items, and files that cannot be one; no media are read. (0, 0) where the source is still to come.

    Raises DataError for one that holds none.
    """
    from verst.data.bad_files import BadFiles
    from verst.data.sources import read_items

    if not is_there(source):
        return 0, 0
    table = source_table(source)
    bad = BadFiles(Path(os.devnull), "skip")
    try:
        return len(read_items(_KINDS[table["type"]](**table), bad)), len(bad)
    except DataError as error:
        raise DataError(f"--data {source}: {error}") from None
