"""The fast checksum: an independent formula in Python's integers, and every fault that a hand-off may have."""

from __future__ import annotations

import struct

import pytest
import torch
from torch import Tensor

from verst.weights.digest import SEGMENT, _odd_keys, digest_of, kind_of, segment_keys, segments_of, word_digests

_MASK = 2**32 - 1


def odd_key(index: int) -> int:
    x = index & _MASK
    x = ((x ^ (x >> 16)) * 0x21F0AAAD) & _MASK
    x = ((x ^ (x >> 15)) * 0x735A2D97) & _MASK
    x ^= x >> 15
    return (2 * x * 0x1B873593CC9E2D51 + 1) % 2**64


def by_hand(tensor: Tensor) -> int:
    """The formula of the module's first lines."""
    data = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    data += b"\0" * (-len(data) % 4)
    total = 0
    for position, (word,) in enumerate(struct.iter_unpack("<i", data)):
        total += odd_key(SEGMENT + position // SEGMENT) * odd_key(position % SEGMENT) * word
    return total % 2**64


def one(tensor: Tensor) -> int:
    return int(word_digests([tensor])[0]) % 2**64


@pytest.mark.parametrize(
    "tensor",
    [
        torch.randn(2 * SEGMENT + 5, generator=torch.Generator().manual_seed(0)),
        torch.randn(3, SEGMENT + 1, generator=torch.Generator().manual_seed(1)).bfloat16(),
        torch.randn(7, generator=torch.Generator().manual_seed(2)).half(),
        torch.tensor(2.5),
        torch.randn(6, 4, generator=torch.Generator().manual_seed(3)).t(),
        torch.arange(9, dtype=torch.float16)[1:],
        torch.zeros(0),
    ],
)
def test_it_is_the_formula(tensor: Tensor) -> None:
    assert one(tensor) == by_hand(tensor)


def test_keys_are_odd_and_differ_where_swaps_need_it() -> None:
    keys = _odd_keys(torch.arange(2 * SEGMENT))
    assert bool((keys % 2 == 1).all())
    assert len(set((keys & (2**33 - 1)).tolist())) == 2 * SEGMENT
    assert segment_keys(torch.device("cpu"))[7].item() % 2**64 == odd_key(7)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_any_one_bit_is_found(dtype: torch.dtype) -> None:
    tensor = torch.randn(200, generator=torch.Generator().manual_seed(4)).to(dtype)
    found = {one(tensor)}
    raw = tensor.view(torch.uint8)
    for byte in range(0, len(raw), 7):
        for bit in range(8):
            raw[byte] ^= 1 << bit
            found.add(one(tensor))
            raw[byte] ^= 1 << bit
    assert len(found) == 1 + 8 * len(range(0, len(raw), 7))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_exchanged_elements_are_found(dtype: torch.dtype) -> None:
    tensor = torch.randn(2 * SEGMENT, generator=torch.Generator().manual_seed(5)).to(dtype)
    right, places = one(tensor), torch.randint(len(tensor), (200, 2), generator=torch.Generator().manual_seed(6))
    for i, j in [*places.tolist(), (0, 1), (1, 2), (0, SEGMENT)]:
        if bool(tensor[i] == tensor[j]):
            continue
        swapped = tensor.clone()
        swapped[i], swapped[j] = tensor[j], tensor[i]
        assert one(swapped) != right
    assert one(tensor.flip(0)) != right
    assert one(tensor.view(2, -1).flip(0)) != right
    assert one(tensor.roll(1)) != right


def test_differences_that_cancel_in_a_plain_sum_are_found() -> None:
    tensor = torch.arange(1000, dtype=torch.int32)
    for changes in ({3: 5, 9: -5}, {3: 1, 4: -2, 5: 1}, {0: 2**30, 1: 2**30, 2: -(2**31)}):
        other = tensor.clone()
        for place, change in changes.items():
            other[place] += change
        assert one(other.view(torch.float32)) != one(tensor.view(torch.float32))


@pytest.mark.parametrize("kind", ["multilinear", "sha256"])
def test_names_shapes_dtypes_and_values_count_and_order_does_not(kind: str) -> None:
    tensors = {"a": torch.arange(4.0), "b": torch.zeros(4)}
    others = [
        {"a": torch.arange(4.0), "c": torch.zeros(4)},
        {"a": torch.zeros(4), "b": torch.arange(4.0)},
        {"a": torch.arange(4.0).view(2, 2), "b": torch.zeros(4)},
        {"a": torch.arange(4.0), "b": torch.zeros(4, dtype=torch.int32)},
        {"a": torch.tensor([0.0, 1.0, 2.0, 3.0000002]), "b": torch.zeros(4)},
        {"a": torch.arange(4.0)},
    ]
    right = digest_of(tensors, kind)  # type: ignore[arg-type]
    assert kind_of(right) == kind
    assert len({right, *(digest_of(other, kind) for other in others)}) == 7  # type: ignore[arg-type]
    assert digest_of({"b": tensors["b"], "a": tensors["a"]}, kind) == right  # type: ignore[arg-type]


def test_segments_as_a_kernel_sees_them_add_up_to_the_same() -> None:
    """The table that the Triton kernel works from: each segment's address, length, owner and factor."""
    tensors = [torch.randn(n, generator=torch.Generator().manual_seed(n)) for n in (2 * SEGMENT + 3, 5, SEGMENT)]
    spans = tuple((t.data_ptr(), t.numel()) for t in tensors)
    pointers, lengths, owners, factors = (t.tolist() for t in segments_of(torch.device("cpu"), spans))
    assert lengths == [SEGMENT, SEGMENT, 3, 5, SEGMENT]
    sums = [0, 0, 0]
    for pointer, length, owner, factor in zip(pointers, lengths, owners, factors, strict=True):
        start = (pointer - tensors[owner].data_ptr()) // 4
        words = tensors[owner][start : start + length].view(torch.int32).tolist()
        sums[owner] += factor * sum(odd_key(place) * word for place, word in enumerate(words))
    assert [total % 2**64 for total in sums] == [one(tensor) for tensor in tensors]
