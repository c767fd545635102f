"""Model families: one adapter each. A folder is recognised by its model_index.json, never by its name."""

from __future__ import annotations

import copy
import inspect
import json
from collections.abc import Sequence
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from verst.config.plugins import load_object
from verst.errors import ModelError
from verst.families.base import ALL_PARTS, Components, Family, Part, SamplingDefaults
from verst.families.cosmos3 import Cosmos3
from verst.families.cosmos_predict2 import CosmosPredict2
from verst.families.flux1 import Flux1
from verst.families.flux2 import Flux2, Flux2Klein
from verst.families.hunyuan_video import HunyuanVideo, HunyuanVideo15
from verst.families.krea2 import Krea2
from verst.families.loading import index_file
from verst.families.ltx2 import Ltx2
from verst.families.minimax_h3 import MiniMaxH3
from verst.families.qwen_image import QwenImage
from verst.families.qwen_image_21 import QwenImage21
from verst.families.qwen_image_edit import QwenImageEdit, QwenImageEditPlus
from verst.families.qwen_image_layered import QwenImageLayered
from verst.families.sana import Sana
from verst.families.sd3 import Sd3
from verst.families.wan import Wan, WanImageToVideo
from verst.families.z_image import ZImage
from verst.types import Geometry

FAMILIES: dict[str, Family] = {
    "QwenImage21Pipeline": QwenImage21(),
    "QwenImageLayeredPipeline": QwenImageLayered(),
    "Flux2KleinPipeline": Flux2Klein(),
    "Flux2Pipeline": Flux2(),
    "FluxPipeline": Flux1(),
    "HunyuanVideo15Pipeline": HunyuanVideo15(),
    "HunyuanVideoPipeline": HunyuanVideo(),
    "Krea2Pipeline": Krea2(),
    "LTX2Pipeline": Ltx2(),
    "QwenImageEditPipeline": QwenImageEdit(),
    "QwenImageEditPlusPipeline": QwenImageEditPlus(),
    "QwenImagePipeline": QwenImage(),
    "StableDiffusion3Pipeline": Sd3(),
    "WanImageToVideoPipeline": WanImageToVideo(),
    "WanPipeline": Wan(),
    "ZImagePipeline": ZImage(),
    "SanaPipeline": Sana(),
    "Cosmos3OmniPipeline": Cosmos3(),
    "MiniMaxH3ModularPipeline": MiniMaxH3(),
    "Cosmos2_5_PredictBasePipeline": CosmosPredict2(),
}
"""Pipeline class in the index -> family."""
ENTRY_POINTS = "verst.families"
"""Of installed packages: pipeline class -> a class without arguments, or an object, that is a Family."""

__all__ = ["ALL_PARTS", "FAMILIES", "Components", "Family", "Geometry", "Part", "SamplingDefaults", "recognise"]


@runtime_checkable
class PerCheckpoint(Protocol):
    """A family whose velocity depends on settings outside the transformer, e.g. the boundary between two experts."""

    def for_checkpoint(self, folder: Path) -> Family:
        """The adapter of this folder. Raises ModelError."""


def recognise(folder: Path, *, fp32_modules: Sequence[str] = ()) -> Family:
    """The family of a diffusers folder: ours, or that of an installed package (ENTRY_POINTS).

    Raises ModelError, naming the file and what is known, and ConfigError for an entry point that cannot be imported.
    fp32_modules: names to add to the family's own, see `Family.fp32_modules`.
    """
    index = index_file(folder)
    try:
        name = json.loads(index.read_text())["_class_name"]
    except FileNotFoundError:
        raise ModelError(f"{index} does not exist: {folder} is no model folder in the diffusers layout") from None
    except (ValueError, KeyError) as error:
        raise ModelError(f"{index} is not a diffusers model index: {error!r}") from None
    installed = entry_points(group=ENTRY_POINTS).names
    if name in FAMILIES:
        family = FAMILIES[name]
    elif name in installed:
        found: Any = load_object(name, group=ENTRY_POINTS, key=f"_class_name of {index}")
        made: Any = found() if inspect.isclass(found) else found
        family = made
    else:
        raise ModelError(f"{index} is a {name}; known pipelines: {', '.join(sorted({*FAMILIES, *installed}))}")
    family = family.for_checkpoint(folder) if isinstance(family, PerCheckpoint) else family
    if fp32_modules:
        family = copy.copy(family)
        family.fp32_modules = (*family.fp32_modules, *fp32_modules)
    return family
