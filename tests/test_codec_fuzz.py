"""The wire codec against whatever bytes: what was written comes back, what was not is an EngineError and nothing else."""

from __future__ import annotations

import json
import struct
from collections.abc import AsyncIterator
from typing import Any

import httpx
import msgpack
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from verst.engine.blocks import BlockHandle, BlockPool, open_block
from verst.engine.codec import SAFETENSORS
from verst.engine.wire import Answer, decode_response, encode_response, share_response
from verst.errors import EngineError

more = settings(max_examples=60, deadline=None)


@st.composite
def tensors(draw: st.DrawFn) -> Tensor:
    dtype = draw(st.sampled_from(list(SAFETENSORS.values())))
    shape = draw(st.lists(st.integers(0, 5), max_size=4))
    count = int(torch.tensor(shape).prod()) if shape else 1
    data = draw(st.binary(min_size=count * dtype.itemsize, max_size=count * dtype.itemsize))
    if dtype == torch.bool:
        data = bytes(byte & 1 for byte in data)
    flat = torch.frombuffer(bytearray(data), dtype=dtype) if count else torch.empty(0, dtype=dtype)
    tensor = flat.reshape(shape)
    return tensor.transpose(0, -1) if draw(st.booleans()) and tensor.ndim > 1 else tensor


plain = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False)
    | st.text(max_size=40)
    | st.binary(max_size=40)
)


def framed(parts: tuple[int, int, bytes]) -> bytes:
    """A frame of a compressed answer that may be none."""
    return struct.pack("<II", parts[0], parts[1]) + parts[2]


class Body(httpx.AsyncByteStream):
    def __init__(self, data: bytes) -> None:
        self._data = data

    async def __aiter__(self) -> AsyncIterator[bytes]:
        yield self._data


names = st.text(max_size=10).filter(lambda name: not name.startswith("__"))
records = st.dictionaries(
    names,
    st.recursive(
        plain | tensors(), lambda inner: st.lists(inner, max_size=4) | st.dictionaries(names, inner, max_size=4)
    ),
    max_size=5,
)
responses = st.lists(records, max_size=3)


def same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        bits = isinstance(other, Tensor) and one.dtype == other.dtype and one.shape == other.shape
        # By their bytes: NaN is equal to itself here.
        return (
            bits
            and one.contiguous().view(-1).view(torch.uint8).tolist()
            == other.contiguous().view(-1).view(torch.uint8).tolist()
        )
    if isinstance(one, dict):
        return (
            isinstance(other, dict) and one.keys() == other.keys() and all(same(one[name], other[name]) for name in one)
        )
    if isinstance(one, list):
        return isinstance(other, list) and len(one) == len(other) and all(map(same, one, other))
    return type(one) is type(other) and one == other


@more
@given(samples=responses)
def test_what_is_written_comes_back(samples: list[dict[str, Any]]) -> None:
    assert same(decode_response(encode_response(samples)), samples)


@settings(max_examples=50, deadline=None)
@given(samples=responses, big=tensors())
def test_what_is_shared_comes_back(samples: list[dict[str, Any]], big: Tensor) -> None:
    large = torch.arange(5000, dtype=torch.float32)
    samples = [{"large": large, "big": big, "again": large}, *samples]
    pool = BlockPool(2**24)
    shared = share_response(samples, pool)
    assert shared is not None
    body, handle = shared
    read = decode_response(Answer(body=body, shared=open_block(handle)))
    assert same(read, samples)
    with pytest.raises(EngineError):
        decode_response(body)  # without its block
    del read
    pool.close()


def readable_or_refused(body: bytes, shared: Tensor | None = None) -> None:
    try:
        samples = decode_response(Answer(body=body, shared=shared))
    except EngineError:
        return
    assert isinstance(samples, list)


numbers = st.integers(-(2**40), 2**40) | st.just(2**63 - 1) | st.booleans() | st.floats() | st.text(max_size=3)
shapes = st.lists(numbers, max_size=4) | numbers | st.none()
dtypes = st.sampled_from(["torch.float32", "F32", "torch.quint8", "BF16", ""]) | st.integers(0, 9)


@more
@given(shape=shapes, dtype=dtypes, offsets=st.lists(numbers, max_size=3), data=st.binary(max_size=32))
@example(shape=[2**40, 2**40], dtype="F32", offsets=[0, 2**62], data=b"")
@example(shape=[0, 2**62], dtype="F32", offsets=[0, 0], data=b"")
def test_a_tensor_that_says_anything_of_itself(shape: Any, dtype: Any, offsets: list[Any], data: bytes) -> None:
    header = json.dumps({"t": {"dtype": dtype, "shape": shape, "data_offsets": offsets}}).encode()
    file = struct.pack("<Q", len(header)) + header + data
    body = msgpack.packb([{"x": {"__tensor__": True, "data": file, "shape": [1], "dtype": "torch.float32"}}])
    readable_or_refused(body)


@more
@given(shape=shapes, dtype=dtypes, offset=numbers)
@example(shape=[2**62], dtype="torch.float32", offset=0)
@example(shape=[1], dtype="torch.float32", offset=2**62)
@example(shape=[0, 2**62], dtype="torch.float32", offset=0)
def test_a_place_in_a_block_that_is_anywhere(shape: Any, dtype: Any, offset: Any) -> None:
    if isinstance(offset, int) and not isinstance(offset, bool):
        offset = max(-(2**63), min(offset, 2**64 - 1))
    body = msgpack.packb([{"x": {"__shared__": True, "offset": offset, "shape": shape, "dtype": dtype}}])
    readable_or_refused(body, torch.zeros(256, dtype=torch.uint8))


@pytest.mark.parametrize(
    "path",
    ["/etc/passwd", "/proc/1/mem", "/proc/self/fd/0", "/proc/1/fd/../environ", "/dev/zero", "", "\0", "x" * 5000],
)
def test_a_handle_opens_blocks_and_nothing_else(path: str) -> None:
    with pytest.raises(EngineError, match="cannot be opened"):
        open_block(BlockHandle(path, "00", 1, 8))
