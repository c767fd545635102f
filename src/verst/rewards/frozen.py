"""Frozen models of rewards: from a local folder in the transformers layout, in eval mode, without gradients.

Nothing is downloaded. What a folder lacks is a ConfigError that names the key, the folder and the file, when the reward is
made: before the first iteration.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from verst.config.rewards import ModelReward, PromptReward, RewardBase, reward_name
from verst.errors import ConfigError, RewardError
from verst.rewards.base import RewardBatch

log = logging.getLogger(__name__)
Module = TypeVar("Module", bound=nn.Module)

TOKENIZER = (("tokenizer.json", "vocab.json", "vocab.txt"),)
"""What any tokenizer folder has one of; `needs` of `lacking`."""
PROCESSOR = ("preprocessor_config.json",)
WEIGHTS = (("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json"),)


def folder_of(path: str) -> Path:
    return Path(path).expanduser()


def lacking(path: str, needs: Sequence[str | tuple[str, ...]], *, key: str = "path") -> list[str]:
    """One line where `path` is no folder, or for each file of `needs` that it lacks; of a tuple one is enough."""
    folder = folder_of(path)
    if not folder.is_dir():
        return [f"{key} = {path!r} is no folder; put the checkpoint there, nothing is downloaded"]
    names = [(need,) if isinstance(need, str) else need for need in needs]
    return [f"{key} = {path!r} has no {' or '.join(n)}" for n in names if not any((folder / x).is_file() for x in n)]


def lacking_file(path: str, *, key: str) -> list[str]:
    """One line where `path` is no file."""
    return [] if Path(path).expanduser().is_file() else [f"{key} = {path!r} is no file"]


def refuse(config: RewardBase, lines: Sequence[str]) -> None:
    """Raises ConfigError where a reward lacks something."""
    if lines:
        raise ConfigError(f"reward {reward_name(config)}: {'; '.join(lines)}")


def device_of(config: ModelReward) -> torch.device:
    """The device of a reward. Raises ConfigError where this process has no such device."""
    device = torch.device(config.device)
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ConfigError(
            f"reward {reward_name(config)}: device = {config.device!r}, but its process sees {torch.cuda.device_count()} CUDA "
            "devices; use device = cpu"
        )
    return device


def pretrained(kind: Any, folder: Path, config: ModelReward) -> Any:
    """A model of transformers with all its weights from `folder`. Raises ConfigError where some are missing or misshapen."""
    try:
        model, report = kind.from_pretrained(
            folder, local_files_only=True, dtype=dtype_of(config), output_loading_info=True
        )
    except (OSError, ValueError, RuntimeError, ImportError) as error:
        raise ConfigError(
            f"reward {reward_name(config)}: {folder} cannot be loaded as {kind.__name__}: {error}"
        ) from error
    wrong = sorted(map(str, {*report["missing_keys"], *report["mismatched_keys"]}))
    if wrong:
        raise ConfigError(f"reward {reward_name(config)}: {folder} lacks {len(wrong)} weights, e.g. {wrong[0]}")
    return frozen(model, config)


def frozen(module: Module, config: ModelReward) -> Module:
    """`module` in eval mode on the reward's device, without gradients.

    Its dtype stays: a cast would take along what transformers keeps in fp32, such as the frequencies of rotary positions.
    """
    return module.to(device_of(config)).eval().requires_grad_(False)


def dtype_of(config: ModelReward) -> torch.dtype:
    return {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}[config.dtype]


def state_of(config: ModelReward, file: Path) -> dict[str, Tensor]:
    """The tensors of a .safetensors file, or of a pickled state dict read with weights_only. Raises ConfigError.

    A state dict may lie under the key `state_dict` or `model`, as training scripts save it, with the prefix `module.`.
    """
    try:
        if file.suffix == ".safetensors":
            state: Any = load_file(file)
        else:
            state = torch.load(file, map_location="cpu", weights_only=True)
    except (OSError, ValueError, RuntimeError, EOFError, UnpicklingError, SafetensorError) as error:
        reason = str(error).partition("\n")[0]
        raise ConfigError(f"reward {reward_name(config)}: {file} cannot be read as weights: {reason}") from error
    for key in ("state_dict", "model"):
        if isinstance(state, Mapping) and isinstance(state.get(key), Mapping):
            state = state[key]
    named = state.items() if isinstance(state, Mapping) else ()
    tensors = {str(name).removeprefix("module."): value for name, value in named if isinstance(value, Tensor)}
    if not tensors:
        raise ConfigError(f"reward {reward_name(config)}: {file} holds no tensors by name")
    return tensors


def built(
    kind: Any, model_config: Any, state: Mapping[str, Tensor], config: ModelReward, *, source: Path, **options: Any
) -> Any:
    """A model of transformers made of its config and tensors from elsewhere, every one and no other. Raises ConfigError."""
    with torch.device("meta"):
        wanted = kind(model_config, **options).state_dict()
    _check_state(wanted, state, config, source)
    # Not load_state_dict: random weights of billions of parameters take minutes, and twice the memory.
    model = kind.from_pretrained(None, config=model_config, state_dict=dict(state), dtype=dtype_of(config), **options)
    return frozen(model, config)


def fill(module: nn.Module, state: Mapping[str, Tensor], config: ModelReward, *, source: Path) -> None:
    """Loads `state` into a small `module`, every tensor and no other. Raises ConfigError."""
    _check_state(module.state_dict(), state, config, source)
    module.load_state_dict(state)


def _check_state(wanted: Mapping[str, Tensor], state: Mapping[str, Tensor], config: ModelReward, source: Path) -> None:
    """Raises ConfigError that names the first tensor that does not fit."""
    for problem, names in (("lacks", wanted.keys() - state.keys()), ("has unknown", state.keys() - wanted.keys())):
        if names:
            raise ConfigError(
                f"reward {reward_name(config)}: {source} {problem} {len(names)} weights, e.g. {min(names)}"
            )
    for name, tensor in wanted.items():
        if state[name].shape != tensor.shape:
            raise ConfigError(
                f"reward {reward_name(config)}: {source}: {name} is {list(state[name].shape)}, the model takes "
                f"{list(tensor.shape)}"
            )


def shape_of(state: Mapping[str, Tensor], name: str, config: ModelReward, *, source: Path) -> torch.Size:
    """The shape of one tensor of a checkpoint, from which a model is built. Raises ConfigError where it is not there."""
    if name not in state:
        raise ConfigError(
            f"reward {reward_name(config)}: {source} has no weight {name}: it is another kind of checkpoint"
        )
    return state[name].shape


def image_processor(folder: Path, config: ModelReward, **options: Any) -> Any:
    """The folder's own image processor: Pillow on a CPU, torchvision on the reward's GPU."""
    from transformers import AutoImageProcessor

    backend = "torchvision" if device_of(config).type == "cuda" else "pil"
    return AutoImageProcessor.from_pretrained(folder, backend=backend, local_files_only=True, **options)


def processed(processor: Any, frames: Tensor, device: torch.device, **options: Any) -> Any:
    """What a model takes of uint8 [N, H, W, 3], made by its processor; its tensors lie on `device`."""
    if processor.backend == "torchvision":
        images, order = list(frames.to(device).permute(0, 3, 1, 2)), "channels_first"
    else:
        images, order = list(frames.cpu().numpy()), "channels_last"
    # Said, not guessed: a picture three pixels high would be taken for one with channels first.
    return processor(images, return_tensors="pt", input_data_format=order, **options).to(device)


def tokenizer_of(folder: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder, local_files_only=True)


def long_prompts(tokenizer: Any, prompts: Sequence[str], limit: int) -> dict[str, int]:
    """Prompt -> its length in tokens, for those longer than `limit`."""
    unique = list(dict.fromkeys(prompts))
    lengths = map(len, tokenizer(unique, truncation=False, verbose=False)["input_ids"]) if unique else ()
    return {prompt: length for prompt, length in zip(unique, lengths, strict=True) if length > limit}


def long_prompt_problems(config: PromptReward, tokenizer: Any, prompts: Sequence[str], limit: int) -> list[str]:
    """One line for each prompt that the reward refuses for its length; none where it may truncate."""
    if config.long_prompts == "truncate":
        return []
    return [
        f"reward {reward_name(config)}: prompt {prompt[:60]!r} has {length} tokens of at most {limit}; shorten it, or set "
        'long_prompts = "truncate"'
        for prompt, length in long_prompts(tokenizer, prompts, limit).items()
    ]


def tokens(config: PromptReward, tokenizer: Any, prompts: Sequence[str], limit: int) -> Any:
    """input_ids and attention_mask [N, limit], padded to the limit: a row does not depend on its neighbours.

    Raises RewardError for a longer prompt, or cuts it and says how many in the log, by `long_prompts`.
    """
    problems = long_prompt_problems(config, tokenizer, prompts, limit)
    if problems:
        raise RewardError(problems[0])
    cut = long_prompts(tokenizer, prompts, limit)
    if cut:
        log.warning(
            "reward %s: %d of %d prompts cut to %d tokens", reward_name(config), len(cut), len(set(prompts)), limit
        )
    return tokenizer(list(prompts), padding="max_length", max_length=limit, truncation=True, return_tensors="pt")


def chunks(count: int, size: int) -> Iterator[slice]:
    """Slices of at most `size` rows that cover `count`."""
    return (slice(start, min(start + size, count)) for start in range(0, count, size))


def pictures(batch: RewardBatch) -> Tensor:
    """uint8 [B, H, W, 3] of a batch of images. Raises RewardError for clips."""
    return torch.from_numpy(batch.pictures())


def rating_head(width: int) -> nn.Sequential:
    """width -> 1024 -> 128 -> 64 -> 16 -> 1 without activations, as the aesthetic predictor and ImageReward have it."""
    return nn.Sequential(
        nn.Linear(width, 1024),
        nn.Dropout(0.2),
        nn.Linear(1024, 128),
        nn.Dropout(0.2),
        nn.Linear(128, 64),
        nn.Dropout(0.1),
        nn.Linear(64, 16),
        nn.Linear(16, 1),
    )
