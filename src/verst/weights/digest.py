"""Checksums of tensors, where they are: one pass over the bytes, the same number on every device.

A tensor is read as little-endian 32-bit words w, cut into segments of 2^14. Its digest is

    D = sum_s C_s sum_i K_i w_(s,i)   mod 2^64,   K_i and C_s odd, spread by a bijective 32-bit mixer,

a multilinear hash (Carter and Wegman 1979; Lemire and Kaser 2014) with fixed, public keys. What it finds:

- one changed word, whatever the bits: certainly, since an odd key times a difference below 2^32 is not 0 mod 2^64;
- two words, or two half words, of a segment exchanged: certainly, since the K_i differ mod 2^33;
- anything else: for keys drawn at random, one fixed pair of unlike tensors collides with a probability of at most
  2^-32 (all differences multiples of 2^31), of about 2^-63 for differences that have an odd one among them.

That is for faults, not for adversaries: whoever wants to can find a collision. SHA-256 is there for those.
Integer sums have no order of rounding, so CPU, CUDA and Triton agree in every bit.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor

DigestKind = Literal["multilinear", "sha256"]

SEGMENT = 2**14
"""Words; the keys of one segment (128 KiB) stay in a GPU's L1 cache."""
_ROWS = {"cpu": 16, "cuda": 2048}
"""Segments of one torch operation: temporaries of 8 bytes a word that fit the CPU's cache, and 256 MiB on a GPU."""
_MULTIPLIER = 0x1B873593CC9E2D51


class Ledger:
    """Names, dtypes and shapes of tensors, in the order in which their digests will come."""

    def __init__(self, entries: Iterable[tuple[str, str, Sequence[int]]]) -> None:
        labels = [_label(*entry) for entry in entries]
        order = sorted(range(len(labels)), key=labels.__getitem__)
        self._order = torch.tensor(order, dtype=torch.int64)
        self._sha = hashlib.sha256("".join(labels[index] for index in order).encode())

    def digest(self, values: Tensor) -> str:
        """values: [n] int64 on any device, `word_digests` of the tensors. Waits for the device."""
        sha = self._sha.copy()
        sha.update(values.cpu()[self._order].numpy().astype("<i8").tobytes())
        return f"multilinear:{sha.hexdigest()}"


class Digester:
    """`digest_of` the same tensors again and again: what follows from names and shapes is made once."""

    def __init__(self, tensors: Mapping[str, Tensor], kind: DigestKind = "multilinear") -> None:
        self._kind, self._named = kind, dict(tensors)
        self._ledger = Ledger((name, _dtype_name(t.dtype), t.shape) for name, t in tensors.items())

    def digest(self) -> str:
        """Of what the tensors hold now. At most one wait for each device."""
        if self._kind == "sha256":
            return f"sha256:{_sha256(self._named)}"
        tensors = list(self._named.values())
        values = torch.zeros(len(tensors), dtype=torch.int64)
        # Asked anew: a module may have been moved since.
        devices: dict[torch.device, list[int]] = {}
        for index, tensor in enumerate(tensors):
            devices.setdefault(tensor.device, []).append(index)
        for indices in devices.values():
            values[indices] = word_digests([tensors[index] for index in indices]).cpu()
        return self._ledger.digest(values)


def digest_of(tensors: Mapping[str, Tensor], kind: DigestKind = "multilinear") -> str:
    """`<kind>:<hex>` over names (in an order of their own), dtypes, shapes and bytes. At most one wait for each device."""
    return Digester(tensors, kind).digest()


def _label(name: str, dtype: str, shape: Sequence[int]) -> str:
    return f"{name}|{dtype}|{tuple(shape)}|"


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def kind_of(digest: str) -> DigestKind:
    return "sha256" if digest.startswith("sha256:") else "multilinear"


def word_digests(tensors: Sequence[Tensor]) -> Tensor:
    """[n] int64 on the tensors' one device: D of each, as a signed number. Does not wait for the device."""
    if not tensors:
        return torch.zeros(0, dtype=torch.int64)
    device = tensors[0].device
    if has_kernel(device):
        return _by_kernel(tensors, device)
    return torch.stack([_digest(tensor) for tensor in tensors])


def has_kernel(device: torch.device) -> bool:
    return device.type == "cuda" and _has_triton()


@functools.cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def _sha256(tensors: Mapping[str, Tensor]) -> str:
    sha = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].detach().cpu().contiguous()
        sha.update(f"{name}|{tensor.dtype}|{tuple(tensor.shape)}|".encode())
        sha.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return sha.hexdigest()


def _by_kernel(tensors: Sequence[Tensor], device: torch.device) -> Tensor:
    from verst.weights import words_triton

    whole = [tensor.contiguous() for tensor in tensors]
    fits = [is_whole_words(tensor) for tensor in whole]
    spans = tuple((t.data_ptr(), t.nbytes // 4 if fit else 0) for t, fit in zip(whole, fits, strict=True))
    out = torch.zeros(len(tensors), dtype=torch.int64, device=device)
    words_triton.run(segments_of(device, spans), keys=segment_keys(device), segment=SEGMENT, sums=out, broken=out[:0])
    for index, fit in enumerate(fits):
        if not fit:
            out[index] = _digest(whole[index])
    return out


def is_whole_words(tensor: Tensor) -> bool:
    """What ends in half a word, or begins in one, a kernel cannot read."""
    return tensor.data_ptr() % 4 == 0 and tensor.nbytes % 4 == 0


Plan = tuple[Tensor, Tensor, Tensor, Tensor]
"""Of each segment: address, words, index of its tensor, factor C_s; all [S] int64."""


@functools.lru_cache(maxsize=16)
def segments_of(device: torch.device, spans: tuple[tuple[int, int], ...]) -> Plan:
    """Parameters and staging buffers stay where they are, so that a run asks for the same few plans again."""
    addresses, words = torch.tensor(spans, dtype=torch.int64).unbind(1)
    counts = (words + SEGMENT - 1) // SEGMENT
    owners = torch.repeat_interleave(torch.arange(len(spans)), counts)
    index = torch.arange(len(owners)) - torch.repeat_interleave(counts.cumsum(0) - counts, counts)
    pointers = addresses[owners] + index * (4 * SEGMENT)
    lengths = (words[owners] - index * SEGMENT).clamp(max=SEGMENT)
    plan = (pointers, lengths, owners, _odd_keys(index + SEGMENT))
    return tuple(t.to(device) for t in plan)  # type: ignore[return-value]


def _digest(tensor: Tensor) -> Tensor:
    """D by torch operations: scalar int64."""
    words = _words(tensor)
    total = torch.zeros((), dtype=torch.int64, device=words.device)
    keys = segment_keys(words.device)
    rows, full = _ROWS.get(words.device.type, 4), len(words) // SEGMENT
    segments = words[: full * SEGMENT].view(full, SEGMENT)
    for start in range(0, full, rows):
        part = segments[start : start + rows]
        factors = _factors(words.device, start, len(part))
        total = total + ((part * keys).sum(1) * factors).sum()
    rest = words[full * SEGMENT :]
    if len(rest):
        total = total + (rest * keys[: len(rest)]).sum() * _factors(words.device, full, 1)[0]
    return total


def _words(tensor: Tensor) -> Tensor:
    """[W] int32 over the tensor's bytes, the last word filled up with zeros."""
    data = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    if data.data_ptr() % 4 or len(data) % 4:
        padded = data.new_zeros(-(-len(data) // 4) * 4)
        padded[: len(data)] = data
        data = padded
    return data.view(torch.int32)


@functools.lru_cache(maxsize=16)
def segment_keys(device: torch.device) -> Tensor:
    """[SEGMENT] int64: K_i."""
    return _odd_keys(torch.arange(SEGMENT)).to(device)


def _factors(device: torch.device, first: int, count: int) -> Tensor:
    """[count] int64: C_s from s = `first` on."""
    # The keys go on where those of a segment's words end.
    return _odd_keys(torch.arange(first, first + count, device=device) + SEGMENT)


def _odd_keys(index: Tensor) -> Tensor:
    """Odd, and unlike mod 2^33 for unlike indices below 2^32."""
    mask = 0xFFFFFFFF
    x = index & mask
    x = ((x ^ (x >> 16)) * 0x21F0AAAD) & mask
    x = ((x ^ (x >> 15)) * 0x735A2D97) & mask
    x = x ^ (x >> 15)
    return 2 * (x * _MULTIPLIER) + 1
