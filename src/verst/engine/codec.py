"""msgpack with tensors, written in parts that are views of the tensors, and read as views of what was received.

The contract's tensor is `{"__tensor__": true, "data": a safetensors file with the one key "t", "shape": [...],
"dtype": "torch.float32"}`. Ours of one host is `{"__shared__": true, "offset": bytes into a shared block, "shape":
[...], "dtype": ...}`. msgpack's own reader copies every binary value, so the reader here is written out.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import msgpack
import torch
from torch import Tensor

from verst.engine.blocks import ALIGNMENT

SAFETENSORS: dict[str, torch.dtype] = {
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
_NAMES = {dtype: name for name, dtype in SAFETENSORS.items()}
_BY_TORCH_NAME = {str(dtype): dtype for dtype in SAFETENSORS.values()}
_BIN32_MAX = 2**32 - 1
_SMALL_BYTES = 64 * 2**10
"""Values below this are copied into the part before them."""
_DEPTH = 64
"""Deepest nesting of a response; no record of ours has 8."""


class Writer:
    """Collects the parts of one message. Tensors on the CPU are views in them: they must not change meanwhile."""

    def __init__(self, places: Mapping[int, int] | None = None) -> None:
        """places: id of a tensor -> its offset in the shared block that it lies in."""
        self._places = places or {}
        self._packer = msgpack.Packer()
        self._pending = bytearray()
        self._parts: list[bytes | memoryview] = []
        self._position = 0

    def parts(self) -> list[bytes | memoryview]:
        self._flush()
        return self._parts

    def write(self, value: Any) -> None:
        """Raises TypeError for what no response may hold."""
        if isinstance(value, Tensor):
            place = self._places.get(id(value))
            self._tensor(value) if place is None else self._shared(value, place)
        elif isinstance(value, dict):
            self._pending += self._packer.pack_map_header(len(value))
            for key, item in value.items():
                self._pending += self._packer.pack(key)
                self.write(item)
        elif isinstance(value, list | tuple):
            self._pending += self._packer.pack_array_header(len(value))
            for item in value:
                self.write(item)
        elif value is None or isinstance(value, bool | int | float | str | bytes):
            self._pending += self._packer.pack(value)
        else:
            raise TypeError(f"a response cannot carry a {type(value).__name__}")

    def _shared(self, tensor: Tensor, offset: int) -> None:
        facts = {"__shared__": True, "offset": offset, "shape": list(tensor.shape), "dtype": str(tensor.dtype)}
        self._pending += self._packer.pack(facts)

    def _tensor(self, value: Tensor) -> None:
        tensor = value.detach().cpu().contiguous()
        shape, nbytes = list(tensor.shape), tensor.numel() * tensor.element_size()
        self._pending += self._packer.pack_map_header(4)
        for part in ("shape", shape, "dtype", str(tensor.dtype), "__tensor__", True, "data"):
            self._pending += self._packer.pack(part)
        entry = {"dtype": _NAMES[tensor.dtype], "shape": shape, "data_offsets": [0, nbytes]}
        header = json.dumps({"t": entry}).encode()
        # Spaces after the header are part of the format: with them the values lie aligned in the whole message.
        before = self._position + len(self._pending) + 5 + 8 + len(header)
        header += b" " * (-before % ALIGNMENT)
        size = 8 + len(header) + nbytes
        if size > _BIN32_MAX:
            raise TypeError(f"a response cannot carry a tensor of {nbytes} bytes: msgpack's limit is 4 GiB")
        self._pending += b"\xc6" + struct.pack(">I", size) + struct.pack("<Q", len(header)) + header
        if nbytes:
            self._bytes(tensor.reshape(-1).view(torch.uint8).numpy().data)

    def _bytes(self, data: memoryview) -> None:
        if len(data) < _SMALL_BYTES:
            self._pending += data
            return
        self._flush()
        self._add(data)

    def _flush(self) -> None:
        if self._pending:
            self._add(bytes(self._pending))
            self._pending.clear()

    def _add(self, part: bytes | memoryview) -> None:
        self._parts.append(part)
        self._position += len(part)


class Reader:
    """Reads one message. Tensors are views of `data`, or of the shared block where they lie in one."""

    def __init__(self, data: memoryview, shared: Tensor | None = None) -> None:
        """data: flat bytes. shared: [n] uint8."""
        self._data = data
        self._shared = shared
        self._at = 0

    def read(self) -> Any:
        """The one value of the message. Raises ValueError where it is none."""
        value = self._value(0)
        if self._at != len(self._data):
            raise ValueError(f"{len(self._data) - self._at} bytes after the end")
        return _plain(value)

    def _value(self, depth: int) -> Any:
        code = self._take(1)[0]
        if code < 0x80:
            return code
        if code >= 0xE0:
            return code - 0x100
        if code < 0x90:
            return self._map(code & 0x0F, depth)
        if code < 0xA0:
            return self._array(code & 0x0F, depth)
        if code < 0xC0:
            return self._text(code & 0x1F)
        if code in _CONSTANTS:
            return _CONSTANTS[code]
        if code in _NUMBERS:
            number = _NUMBERS[code]
            return number.unpack(self._take(number.size))[0]
        if code in _SIZED:
            kind, length = _SIZED[code]
            return kind(self, length.unpack(self._take(length.size))[0], depth)
        raise ValueError(f"a value of type 0x{code:02x}")

    def _take(self, count: int) -> memoryview:
        end = self._at + count
        if end > len(self._data):
            raise ValueError(f"it ends at byte {len(self._data)}, {end} were announced")
        part = self._data[self._at : end]
        self._at = end
        return part

    def _text(self, length: int, depth: int = 0) -> str:
        return str(self._take(length), "utf-8")

    def _bytes(self, length: int, depth: int) -> memoryview:
        return self._take(length)

    def _array(self, length: int, depth: int) -> list[Any]:
        return [_plain(item) for item in self._items(length, depth)]

    def _map(self, length: int, depth: int) -> Any:
        record: dict[Any, Any] = {}
        items = self._items(2 * length, depth)
        for key, value in zip(items, items, strict=True):
            if not isinstance(key, str | int):
                raise ValueError("a key that is neither a text nor a number")
            record[key] = value
        if record.get("__tensor__") is True:
            return self._tensor(record)
        if record.get("__shared__") is True:
            return self._in_block(record)
        return {key: _plain(value) for key, value in record.items()}

    def _items(self, count: int, depth: int) -> Iterator[Any]:
        if depth == _DEPTH:
            raise ValueError(f"nested more than {_DEPTH} deep")
        for _ in range(count):
            yield self._value(depth + 1)

    def _tensor(self, record: Mapping[Any, Any]) -> Tensor:
        data = record["data"]
        if not isinstance(data, memoryview):
            raise ValueError("a tensor without bytes")
        size = int.from_bytes(data[:8], "little")
        entry = json.loads(str(data[8 : 8 + size], "utf-8"))["t"]
        start, end = (_count(offset) for offset in entry["data_offsets"])
        dtype, shape = SAFETENSORS[entry["dtype"]], [_count(n) for n in entry["shape"]]
        count = math.prod(shape)
        if end - start != count * dtype.itemsize or 8 + size + end > len(data):
            raise ValueError(f"a tensor of shape {shape} and dtype {dtype} has {len(data) - 8 - size} bytes")
        if count == 0:
            return torch.empty(shape, dtype=dtype)
        return torch.frombuffer(data, dtype=dtype, count=count, offset=8 + size + start).view(shape)

    def _in_block(self, record: Mapping[Any, Any]) -> Tensor:
        if self._shared is None:
            raise ValueError("a tensor in shared memory, and no block came with it")
        dtype, shape = _BY_TORCH_NAME[record["dtype"]], [_count(n) for n in record["shape"]]
        start = _count(record["offset"])
        end = start + math.prod(shape) * dtype.itemsize
        if end > len(self._shared) or start % ALIGNMENT:
            raise ValueError(f"a tensor at bytes {start}..{end} of a block of {len(self._shared)}")
        return self._shared[start:end].view(dtype).view(shape)


def _count(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ValueError(f"{value!r} where a size belongs")
    return value


def _plain(value: Any) -> Any:
    """Binary values that are no tensor's become bytes."""
    return bytes(value) if isinstance(value, memoryview) else value


_CONSTANTS: dict[int, Any] = {0xC0: None, 0xC2: False, 0xC3: True}
_NUMBERS = {0xCA + i: struct.Struct(f">{code}") for i, code in enumerate("fdBHIQbhiq")}
_LENGTHS = [struct.Struct(f">{code}") for code in "BHI"]
_SIZED: dict[int, tuple[Callable[[Reader, int, int], Any], struct.Struct]] = {
    **{0xC4 + i: (Reader._bytes, length) for i, length in enumerate(_LENGTHS)},
    **{0xD9 + i: (Reader._text, length) for i, length in enumerate(_LENGTHS)},
    **{0xDC + i: (Reader._array, length) for i, length in enumerate(_LENGTHS[1:])},
    **{0xDE + i: (Reader._map, length) for i, length in enumerate(_LENGTHS[1:])},
}
"""Codes with a length after them."""
