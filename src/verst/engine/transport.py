"""How a response travels: what a client accepts, what an engine answers, in which pieces, into which memory.

    Accept: application/msgpack                          the contract: the whole response, streamed
    Accept-Encoding: zstd (or lz4)                       ... in compressed frames, for thin links
    Accept: application/vnd.verst.shared+msgpack, ...    a short message and a block of shared memory, where there is room

Neither side ever holds a second whole copy: the sender's pieces are views of the tensors and wait for the socket, the
receiver's buffer has the announced size from the start.
"""

from __future__ import annotations

import asyncio
import json
import struct
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import httpx
import numpy as np
import pyarrow
import torch
from starlette.responses import Response, StreamingResponse
from torch import Tensor

from verst.engine.blocks import Block, BlockHandle, BlockPool, open_block
from verst.engine.wire import Answer, response_parts, share_response
from verst.errors import EngineError
from verst.web.terms import SHARED, WEIGHT_VERSION

MSGPACK = "application/msgpack"
CODECS = ("zstd", "lz4")
_BLOCK = "verst-block"
"""Header of a shared answer: its block."""
_RAW_BYTES = "verst-raw-bytes"
"""Header of a compressed answer: its size without compression."""
_FRAME = struct.Struct("<II")
"""In front of each compressed frame: its bytes, and what they become."""
_PIECE_BYTES = 512 * 2**10
_FRAME_BYTES = 4 * 2**20


@dataclass(frozen=True, kw_only=True)
class Accepted:
    """What the client of a request takes."""

    shared: bool = False
    codec: str | None = None

    @classmethod
    def of(cls, headers: Mapping[str, str]) -> Accepted:
        """headers: of the request, with names in lower case."""
        types = [part.split(";")[0].strip() for part in headers.get("accept", "").split(",")]
        # First alone: HTTP libraries list last what they happen to have.
        codings = [part.split(";")[0].strip() for part in headers.get("accept-encoding", "").split(",")]
        return cls(shared=SHARED in types, codec=codings[0] if codings[0] in CODECS else None)

    def headers(self) -> dict[str, str]:
        """The same, for a request."""
        accept = f"{SHARED}, {MSGPACK}" if self.shared else MSGPACK
        return {"accept": accept, "accept-encoding": self.codec or "identity"}


@dataclass(frozen=True, kw_only=True)
class Shipment:
    """An encoded response, ready to go."""

    parts: Sequence[bytes | memoryview]
    block: BlockHandle | None = None
    codec: str | None = None
    weight_version: int | None = None
    """Of the samples."""

    @property
    def nbytes(self) -> int:
        return sum(len(part) for part in self.parts)

    def response(self) -> Response:
        headers = {} if self.weight_version is None else {WEIGHT_VERSION: str(self.weight_version)}
        if self.block is not None:
            headers[_BLOCK] = json.dumps(self.block)
            return Response(b"".join(self.parts), media_type=SHARED, headers=headers)
        if self.codec is not None:
            headers |= {"content-encoding": self.codec, _RAW_BYTES: str(self.nbytes)}
            return StreamingResponse(_frames(self.parts, self.codec), media_type=MSGPACK, headers=headers)
        headers["content-length"] = str(self.nbytes)
        return StreamingResponse(_pieces(self.parts, _PIECE_BYTES), media_type=MSGPACK, headers=headers)


def ship(samples: Sequence[dict[str, Any]], accepted: Accepted, pool: BlockPool | None) -> Shipment:
    """The response for a client. pool: None where the engine has no shared memory; when it is full, all is sent."""
    version = samples[0].get("weight_version") if samples else None
    if accepted.shared and pool is not None:
        shared = share_response(samples, pool)
        if shared is not None:
            return Shipment(parts=[shared[0]], block=shared[1], weight_version=version)
    return Shipment(parts=response_parts(samples), codec=accepted.codec, weight_version=version)


async def receive(response: httpx.Response, pool: BlockPool | None) -> Answer:
    """A successful response, of which no body is read yet, as an answer.

    Its bytes come into a block of `pool` where there is room, into memory of this process otherwise. Raises EngineError
    for less or more than was announced, and httpx.TransportError.
    """
    if response.headers.get("content-type", "").startswith(SHARED):
        body = await response.aread()
        return Answer(body=body, shared=open_block(_handle(response.headers.get(_BLOCK, ""))))
    codec = response.headers.get("content-encoding")
    announced = response.headers.get("content-length" if codec is None else _RAW_BYTES)
    if announced is None:
        return Answer(body=await response.aread())
    buffer = _Buffer(_length(announced), pool)
    try:
        if codec is None:
            async for piece in response.aiter_raw():
                buffer.add(piece)
        else:
            async for raw, frame in _split(response.aiter_raw()):
                buffer.add(await asyncio.to_thread(_decompress, frame, raw, codec))
        return Answer(body=buffer.whole())
    finally:
        buffer.drop()


def _handle(text: str) -> BlockHandle:
    try:
        path, block, generation, nbytes = json.loads(text)
    except (ValueError, TypeError) as error:
        raise EngineError(f"an engine's answer names no block of shared memory: {text[:100]!r}") from error
    if not (isinstance(path, str) and isinstance(block, str) and type(generation) is type(nbytes) is int):
        raise EngineError(f"an engine's answer names no block of shared memory: {text[:100]!r}")
    return BlockHandle(path, block, generation, nbytes)


def _length(text: str) -> int:
    if not text.isdecimal() or len(text) > 15:
        raise EngineError(f"an engine announced an answer of {text[:100]!r} bytes")
    return int(text)


class _Buffer:
    """Memory of a known size that is filled from the front."""

    def __init__(self, nbytes: int, pool: BlockPool | None) -> None:
        self._nbytes = nbytes
        self._pool = pool
        self._block: Block | None = None if pool is None or nbytes == 0 else pool.take(nbytes)
        data = torch.empty(nbytes, dtype=torch.uint8) if self._block is None else self._block.data[:nbytes]
        self._data: Tensor | None = data
        self._view: np.ndarray | None = data.numpy()
        self._filled = 0

    def add(self, piece: bytes | memoryview) -> None:
        assert self._view is not None
        end = self._filled + len(piece)
        if end > self._nbytes:
            raise EngineError(f"an engine sent more than the {self._nbytes} bytes that it had announced")
        self._view[self._filled : end] = np.frombuffer(piece, dtype=np.uint8)
        self._filled = end

    def whole(self) -> Tensor:
        """[nbytes] uint8; in a block it is mapped as by everybody else."""
        if self._filled != self._nbytes:
            raise EngineError(f"an engine sent {self._filled} of the {self._nbytes} bytes that it had announced")
        data, self._data, self._view = self._data, None, None
        assert data is not None
        if self._block is None or self._pool is None:
            return data
        block, self._block = self._block, None
        return open_block(self._pool.grant(block, self._nbytes))

    def drop(self) -> None:
        """Give back what nobody got."""
        self._data = self._view = None
        if self._block is not None and self._pool is not None:
            self._pool.put_back(self._block)


async def _pieces(parts: Iterable[bytes | memoryview], size: int) -> AsyncIterator[bytes | memoryview]:
    for part in parts:
        for start in range(0, len(part), size):
            yield part[start : start + size]


async def _frames(parts: Iterable[bytes | memoryview], codec: str) -> AsyncIterator[bytes]:
    for raw in _filled(parts, _FRAME_BYTES):
        frame = await asyncio.to_thread(pyarrow.compress, raw, codec, asbytes=True)
        yield _FRAME.pack(len(frame), len(raw)) + frame


def _filled(parts: Iterable[bytes | memoryview], size: int) -> Iterator[bytes]:
    """The parts end to end, in pieces of `size` bytes; the last may be shorter."""
    held = bytearray()
    for part in parts:
        at = 0
        while at < len(part):
            take = min(size - len(held), len(part) - at)
            held += part[at : at + take]
            at += take
            if len(held) == size:
                yield bytes(held)
                held.clear()
    if held:
        yield bytes(held)


async def _split(pieces: AsyncIterator[bytes]) -> AsyncIterator[tuple[int, bytes]]:
    """(size without compression, frame) of a body that comes in any pieces."""
    held = bytearray()
    async for piece in pieces:
        held += piece
        while len(held) >= _FRAME.size:
            nbytes, raw = _FRAME.unpack_from(held)
            if raw > _FRAME_BYTES:
                raise EngineError(f"an engine announced a frame of {raw} bytes, the largest is {_FRAME_BYTES}")
            if len(held) < _FRAME.size + nbytes:
                break
            yield raw, bytes(held[_FRAME.size : _FRAME.size + nbytes])
            del held[: _FRAME.size + nbytes]
    if held:
        raise EngineError("an engine's compressed answer ends in the middle of a frame")


def _decompress(frame: bytes, raw: int, codec: str) -> memoryview:
    try:
        return memoryview(pyarrow.decompress(frame, decompressed_size=raw, codec=codec))
    except (OSError, ValueError) as error:
        raise EngineError(f"an engine's compressed answer cannot be read: {error}") from error
