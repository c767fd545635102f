"""A model that a recipe names by hub id: its folder in the local cache, downloaded where there is a network."""

from __future__ import annotations

import re
from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

from verst.errors import ModelError

_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_PARTS = ["*.json", "*.txt", "*.model", "*.safetensors", "*.jinja"]
"""What a diffusers folder is made of; pictures and other weight formats stay where they are."""


def local_folder(path: Path) -> Path:
    """`path` itself when it is there, else the snapshot of the hub model of that id.

    Raises ModelError when it is neither, or cannot be had.
    """
    if path.exists() or not _HUB_ID.fullmatch(path.as_posix()):
        return path
    try:
        return Path(snapshot_download(path.as_posix(), allow_patterns=_PARTS))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ModelError(
            f"{path.as_posix()} is no folder here, and as a model of the hub it cannot be had: {reason}. Download it "
            "where there is a network and give its folder as model.path"
        ) from error
