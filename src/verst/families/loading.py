"""Parts of a diffusers folder, loaded as its model_index.json names them."""

from __future__ import annotations

import copy
import json
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

import diffusers
import torch
import transformers
from accelerate import init_empty_weights
from diffusers.models.modeling_utils import no_init_weights
from torch import nn

from verst.errors import ModelError
from verst.families.base import Components, Family, Part
from verst.families.islands import compute_in_fp32, with_islands

_LLAMA_TOKENIZERS = ("LlamaTokenizer", "LlamaTokenizerFast")
"""transformers 5 replaces the splitter that their tokenizer.json states (huggingface/transformers issue 45488)."""


def index_file(folder: Path) -> Path:
    """model_index.json; in Modular Diffusers its name is another, and each component's line has a third entry."""
    modular = folder / "modular_model_index.json"
    return modular if modular.exists() else folder / "model_index.json"


_ALIGNMENT = 64
"""Bytes, of torch's CPU allocator."""


def load_components(
    family: Family,
    folder: Path,
    names: Mapping[Part, tuple[str, ...]],
    *,
    parts: Iterable[Part],
    dtype: torch.dtype,
    device: torch.device,
    optional: Collection[str] = (),
    keep_fp32: Collection[str] = ("vae",),
) -> Components:
    """The components `names` of the wanted parts. Raises ModelError, naming the file.

    optional: components that a checkpoint may lack (then None). keep_fp32: those that stay fp32 whatever `dtype` is:
    decoding in half precision changes what a reward sees. device meta: the transformer's structure, without its weights.
    """
    index = json.loads(index_file(folder).read_text())
    modules: dict[str, Any] = {}
    for name in [name for part in parts for name in names[part]]:
        library, class_name = (index.get(name) or ("", None))[:2]
        if class_name is None:
            if name not in optional:
                raise ModelError(f"{index_file(folder)} names no {name}, which {family.name} needs")
            modules[name] = None
            continue
        own_dtype = torch.float32 if name in keep_fp32 else dtype
        islands = family.fp32_modules if name in names["transformer"] else ()
        modules[name] = _load(folder, name, library, class_name, own_dtype, device, islands)
    return Components(folder=folder, family=family, modules=modules, device=device, dtype=dtype)


def _load(
    folder: Path,
    name: str,
    library: str,
    class_name: str,
    dtype: torch.dtype,
    device: torch.device,
    islands: tuple[str, ...],
) -> Any:
    cls = _class_of(library, class_name)
    if class_name in _LLAMA_TOKENIZERS and (folder / name / "tokenizer.json").exists():
        cls = transformers.PreTrainedTokenizerFast
    if cls is None:
        raise ModelError(f"{index_file(folder)}: {library} has no class {class_name} (for {name})")
    options: dict[str, Any] = {}
    if isinstance(cls, type) and issubclass(cls, nn.Module):
        options["dtype" if library == "transformers" else "torch_dtype"] = dtype
    own = frozenset(getattr(cls, "_keep_in_fp32_modules", None) or ())
    if islands:
        cls = with_islands(cls, islands)
    empty = device.type == "meta" and bool(options)
    try:
        if empty:
            part = _empty(cls, folder / name, dtype)
        else:
            part = cls.from_pretrained(folder, subfolder=name, local_files_only=True, **options)
    except (OSError, ValueError, RuntimeError, KeyError, ImportError) as error:
        raise ModelError(f"{folder / name} cannot be loaded as {class_name}: {error}") from error
    if not isinstance(part, nn.Module):
        return copy.copy(part)
    for pattern in islands:
        if pattern not in own:
            compute_in_fp32(part, pattern)
    if not empty:
        align(part)
        part.to(device)
    return part.eval().requires_grad_(False)


def _empty(cls: Any, folder: Path, dtype: torch.dtype) -> nn.Module:
    """A model as from_pretrained builds it before it reads a file: only parameters have no memory."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with no_init_weights(), init_empty_weights():
            if issubclass(cls, transformers.PreTrainedModel):
                # Not by its constructor, which takes the dtype of the config before the default one.
                config = cls.config_class.from_pretrained(folder, local_files_only=True)
                module: nn.Module = cls._from_config(config, dtype=dtype)
            else:
                module = cls.from_config(cls.load_config(folder, local_files_only=True))
    finally:
        torch.set_default_dtype(before)
    if isinstance(module, transformers.PreTrainedModel):
        module.tie_weights()  # not in there, where every parameter that is set becomes a new one
    return module


def _class_of(library: str, class_name: str) -> Any:
    """As diffusers finds it: a pipeline's own parts stand under the pipeline's package. None where there is none."""
    if library == "transformers":
        return getattr(transformers, class_name, None)
    own = getattr(diffusers.pipelines, library, None)
    return getattr(diffusers, class_name, None) or getattr(own, class_name, None)


def align(module: nn.Module) -> None:
    """Give tensors that lie anywhere in a mapped file memory of their own, aligned as torch allocates.

    Matrix kernels round differently on other alignments: two processes would then disagree in the last bit.
    """
    for tensor in [*module.parameters(), *module.buffers()]:
        if tensor.data_ptr() % _ALIGNMENT:
            tensor.data = tensor.data.clone()


def take_contiguous(module: nn.Module) -> None:
    """Have a module lay its first input out in order before it computes.

    torch multiplies a permuted tensor by a frozen matrix without bias in another order than by one that wants a
    gradient, so that engine and trainer would differ in the last bit. diffusers' own pipeline, whose parameters want
    gradients, computes as this does.
    """
    module.register_forward_pre_hook(_first_contiguous)


def _first_contiguous(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
    return (args[0].contiguous(), *args[1:])


def config_of(components: Components, name: str) -> Mapping[str, Any]:
    """A component's config, also where the component itself was not loaded."""
    module = components.modules.get(name)
    if module is not None:
        return dict(module.config)
    return read_config(components.folder, name)


def read_config(folder: Path, name: str) -> Mapping[str, Any]:
    """The config.json of a component of a diffusers folder."""
    config: Mapping[str, Any] = json.loads((folder / name / "config.json").read_text())
    return config


def index_of(components: Components) -> Mapping[str, Any]:
    """The index, where a pipeline keeps its own settings beside its components' classes."""
    index: Mapping[str, Any] = json.loads(index_file(components.folder).read_text())
    return index
