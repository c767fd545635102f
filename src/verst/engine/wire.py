"""What crosses the wire: the request record, and the response as msgpack with tensors as safetensors bytes.

A response is a list of dicts, one a sample. A tensor is `{"__tensor__": true, "data": a safetensors file with the one
key "t", "shape": [...], "dtype": "torch.float32"}`, everywhere.
"""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Sequence
from typing import Any

import msgpack
import safetensors.torch
import torch
from torch import Tensor

from verst.engine.request import GenerateRequest
from verst.errors import EngineError
from verst.types import Conditioning, Geometry, Microgroup, Sample, SampleKey, StreamTrajectory

__all__ = ["GenerateRequest", "decode_response", "encode_response", "to_microgroup"]

_DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""safetensors' names."""


def encode_response(samples: Sequence[dict[str, Any]]) -> bytes:
    """The msgpack body of a response; tensors may stand anywhere in the nested records."""
    return msgpack.packb(list(samples), default=_encode_tensor, use_bin_type=True)


def decode_response(payload: bytes) -> list[dict[str, Any]]:
    """The samples' records. Tensors are views of the unpacked bytes, not copies: do not write into them.

    Raises EngineError for bytes that are no response.
    """
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="The given buffer is not writable")
            samples = msgpack.unpackb(payload, object_hook=_decode_tensor, strict_map_key=False)
    except (ValueError, KeyError, msgpack.UnpackException) as error:
        raise EngineError(f"an engine's response cannot be read: {error!r}") from error
    if not isinstance(samples, list) or not all(isinstance(sample, dict) for sample in samples):
        raise EngineError("an engine's response is not a list of samples")
    return samples


def to_microgroup(payload: bytes, keys: Sequence[SampleKey]) -> Microgroup:
    """The response of one request as typed records; `keys` name its samples in order.

    Pure, for a pool of parser processes. Raises EngineError when the response is not of these samples.
    """
    records = decode_response(payload)
    if len(records) != len(keys):
        raise EngineError(f"an engine answered {len(records)} samples, {len(keys)} were asked for")
    absent = [name for name in ("echo", "weight_version") if records[0].get(name) is None]
    if absent:
        raise EngineError(f"an engine answered without {', '.join(absent)}, so nothing proves what it did")
    try:
        samples = tuple(_sample(record, key) for record, key in zip(records, keys, strict=True))
        conditioning = _conditioning(records)
    except (KeyError, TypeError) as error:
        raise EngineError(f"an engine's response lacks {error}") from error
    return Microgroup(
        samples=samples,
        conditioning=conditioning,
        echo=records[0]["echo"],
        timings=records[0].get("timings") or {},
    )


def _encode_tensor(value: Any) -> Any:
    if not isinstance(value, Tensor):
        raise TypeError(f"a response cannot carry a {type(value).__name__}")
    tensor = value.detach().cpu().contiguous()
    return {
        "__tensor__": True,
        "data": safetensors.torch.save({"t": tensor}),
        "shape": list(tensor.shape),
        "dtype": str(tensor.dtype),
    }


def _decode_tensor(record: dict[str, Any]) -> Any:
    if record.get("__tensor__") is not True:
        return record
    data: bytes = record["data"]
    size = int.from_bytes(data[:8], "little")
    entry = json.loads(data[8 : 8 + size])["t"]
    start, end = entry["data_offsets"]
    dtype, shape = _DTYPES[entry["dtype"]], entry["shape"]
    count = math.prod(shape)
    if end - start != count * dtype.itemsize or 8 + size + end > len(data):
        raise ValueError(f"a tensor of shape {shape} and dtype {dtype} has {len(data) - 8 - size} bytes")
    if count == 0:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(data, dtype=dtype, count=count, offset=8 + size + start).view(shape)


def _sample(record: dict[str, Any], key: SampleKey) -> Sample:
    return Sample(
        key=key,
        prompt=record["prompt"],
        seed=record["seed"],
        initial_seed=record["initial_seed"],
        weight_version=record["weight_version"],
        media=_media(record),
        fps=record["fps"],
        streams=_streams(record),
        audio=record.get("audio"),
        sample_rate=record.get("sample_rate"),
    )


def _media(record: dict[str, Any]) -> Tensor:
    """uint8 [F, H, W, 3] from whichever form the sample came in; F = 0 where none was asked for."""
    media = record.get("media")
    if media is not None:
        return media
    if record["echo"].get("return_media") is False:
        return torch.zeros((0, record["echo"]["height"], record["echo"]["width"], 3), dtype=torch.uint8)
    pixels: Tensor = record["generated_output"]
    frames = pixels.unsqueeze(1) if pixels.ndim == 3 else pixels
    return (frames * 255).round().to(torch.uint8).permute(1, 2, 3, 0).contiguous()


def _streams(record: dict[str, Any]) -> dict[str, StreamTrajectory]:
    if record["dit_trajectory"] is None:
        return {}
    first = {**record["dit_trajectory"], "log_probs": record["rollout_log_probs"]}
    steps = record["echo"]["rollout_sde_step_indices"]
    return {
        name: StreamTrajectory(
            latents=stream["latents"],
            latent_step_indices=stream["latent_step_indices"],
            sigmas=stream["sigmas"],
            timesteps=stream["grid_timesteps"],
            log_probs=stream["log_probs"],
            sde_step_indices=tuple(steps),
        )
        for name, stream in {record["stream"]: first, **record["extra_streams"]}.items()
    }


def _conditioning(records: Sequence[dict[str, Any]]) -> Conditioning:
    """One row a sample: as sent where the first sample carries all rows, else stacked."""
    first = records[0]["denoising_env"]
    if first is None:
        return Conditioning(positive={}, negative=None)
    geometry = Geometry(**first["image_kwargs"])
    if records[0]["echo"]["share_denoising_env"]:
        return Conditioning(positive=first["pos_cond_kwargs"], negative=first["neg_cond_kwargs"], geometry=geometry)
    envs = [record["denoising_env"] for record in records]

    def stacked(name: str) -> dict[str, Tensor]:
        return {key: torch.stack([env[name][key] for env in envs]) for key in first[name]}

    negative = None if first["neg_cond_kwargs"] is None else stacked("neg_cond_kwargs")
    return Conditioning(positive=stacked("pos_cond_kwargs"), negative=negative, geometry=geometry)
