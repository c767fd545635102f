"""What crosses the wire: the request record, and the response as msgpack, with its tensors in it or in a shared block.

A response is a list of dicts, one a sample; see `codec` for how a tensor stands in it.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from verst.engine.blocks import ALIGNMENT, BlockHandle, BlockPool
from verst.engine.codec import Reader, Writer
from verst.engine.request import GenerateRequest
from verst.errors import EngineError
from verst.types import Conditioning, Geometry, Microgroup, Sample, SampleKey, StreamTrajectory
from verst.web.timing import AnswerTimes

__all__ = ["Answer", "GenerateRequest", "decode_response", "encode_response", "share_response", "to_microgroup"]

SHARED_BYTES = 4096
"""Tensors of at least this size go into the shared block, smaller ones into the message."""


@dataclass(frozen=True, kw_only=True)
class Answer:
    """A response as it was received. Who has it holds the shared memory that it lies in."""

    body: bytes | Tensor
    """The message; a tensor is uint8 [n], e.g. in a block."""
    shared: Tensor | None = None
    """uint8 [n]: the block that the message's larger tensors lie in."""
    times: AnswerTimes | None = None
    """When it came, and what the engine says it did when."""
    made_at: str | None = None
    """URL of the engine, where a router between says it."""
    reissued: int = 0
    """Times that the router had lost another engine over the request before."""

    def portable(self) -> bytes:
        """The same response by itself, as an engine would have sent it to another host."""
        if self.shared is not None:
            return encode_response(decode_response(self))
        return self.body if isinstance(self.body, bytes) else self.body.numpy().tobytes()


def encode_response(samples: Sequence[dict[str, Any]]) -> bytes:
    """The msgpack body of a response; tensors may stand anywhere in the nested records."""
    return b"".join(response_parts(samples))


def response_parts(samples: Sequence[dict[str, Any]]) -> list[bytes | memoryview]:
    """The same body in parts, which are views of the tensors where these lie on the CPU."""
    writer = Writer()
    writer.write(list(samples))
    return writer.parts()


def share_response(samples: Sequence[dict[str, Any]], pool: BlockPool) -> tuple[bytes, BlockHandle] | None:
    """The body of a response whose larger tensors are copied into a block of `pool`, once, from whatever device.

    Equal tensors of the samples lie beside each other. None: no room, or nothing large enough.
    """
    by_path: dict[tuple[Any, ...], list[Tensor]] = {}
    for path, tensor in _tensors(samples):
        if tensor.numel() * tensor.element_size() >= SHARED_BYTES:
            by_path.setdefault(path[1:], []).append(tensor)
    places: dict[int, int] = {}
    total = 0
    for tensor in (tensor for alike in by_path.values() for tensor in alike):
        if id(tensor) not in places:
            places[id(tensor)] = total
            total += -(-tensor.numel() * tensor.element_size() // ALIGNMENT) * ALIGNMENT
    block = pool.take(total) if total else None
    if block is None:
        return None
    try:
        devices = set()
        for tensor in (tensor for alike in by_path.values() for tensor in alike):
            start = places[id(tensor)]
            target = block.data[start : start + tensor.numel() * tensor.element_size()].view(tensor.dtype)
            target.view(tensor.shape).copy_(tensor.detach(), non_blocking=True)
            devices.add(tensor.device)
        for device in devices:
            if device.type == "cuda":
                torch.cuda.current_stream(device).synchronize()
        writer = Writer(places)
        writer.write(list(samples))
        body = b"".join(writer.parts())
    except BaseException:
        pool.put_back(block)
        raise
    return body, pool.grant(block, total)


def decode_response(answer: Answer | bytes) -> list[dict[str, Any]]:
    """The samples' records. Tensors are views of what was received, not copies: do not write into them.

    Raises EngineError for what is no response.
    """
    if isinstance(answer, bytes):
        answer = Answer(body=answer)
    data = memoryview(answer.body) if isinstance(answer.body, bytes) else answer.body.numpy().data
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="The given buffer is not writable")
            samples = Reader(data, answer.shared).read()
    except (ValueError, LookupError, TypeError, RuntimeError, OverflowError) as error:
        raise EngineError(f"an engine's response cannot be read: {error!r}") from error
    if not isinstance(samples, list) or not all(isinstance(sample, dict) for sample in samples):
        raise EngineError("an engine's response is not a list of samples")
    return samples


def to_microgroup(answer: Answer | bytes, keys: Sequence[SampleKey]) -> Microgroup:
    """The response of one request as typed records; `keys` name its samples in order.

    Pure, for a pool of parser processes. Raises EngineError when the response is not of these samples.
    """
    records = decode_response(answer)
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
    )


def _tensors(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Tensor]]:
    """Every tensor of nested records, and the keys and indices that lead to it."""
    if isinstance(value, Tensor):
        yield path, value
    elif isinstance(value, dict | list | tuple):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _tensors(item, (*path, key))


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
        positive, negative = (
            {name: t.expand(len(records), *t.shape[1:]) for name, t in side.items()} if side else side
            for side in (first["pos_cond_kwargs"], first["neg_cond_kwargs"])
        )
        return Conditioning(positive=positive, negative=negative, geometry=geometry)
    envs = [record["denoising_env"] for record in records]

    def stacked(name: str) -> dict[str, Tensor]:
        return {key: torch.stack([env[name][key] for env in envs]) for key in first[name]}

    negative = None if first["neg_cond_kwargs"] is None else stacked("neg_cond_kwargs")
    return Conditioning(positive=stacked("pos_cond_kwargs"), negative=negative, geometry=geometry)
