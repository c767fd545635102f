"""Sequence parallelism of a family's transformer: Ulysses x ring, by hooks on diffusers' own modules.

Tokens are cut where a list of blocks begins and put together where it ends; inside, everything but the attention works
on a rank's own tokens. Around each attention tokens are exchanged for heads, so that the kernel sees whole sequences in
their own order: causal masks and padding masks stay what they are. Lengths need not divide, and nothing is padded.

What a family's blocks take and return is its `SequencePlan`. Engine and trainer call the same `split_sequence`.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, runtime_checkable

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.overrides import TorchFunctionMode

from verst.errors import ConfigError, InvariantError
from verst.flow.exchange import gather_tokens, sum_over_ranks, to_heads, to_tokens
from verst.flow.ring import ring_attention
from verst.flow.shards import shard_sizes

Joined = tuple[str, ...]
"""Sequences in the order in which an attention joins them, each named by the block's argument."""


@dataclass(frozen=True, kw_only=True)
class Along:
    """A tensor, or a tuple of them, with one row for each token."""

    of: Joined
    dim: int
    ndim: int | None = None
    """Where only tensors of that many dimensions have such rows; the others are left as they are."""


@dataclass(frozen=True, kw_only=True)
class Attention:
    """One call of scaled dot product attention."""

    query: Joined
    key: Joined
    mask: Literal["whole", "keys", "pairs"] = "whole"
    """What its mask is made of: the whole sequence; the rank's own keys; the rank's own tokens, in pairs."""


@dataclass(frozen=True, kw_only=True)
class Blocks:
    """A list of blocks that hand tokens on to each other."""

    path: str
    """Attribute of the transformer."""
    tokens: Joined
    """Arguments that are cut before the first block."""
    returns: Joined
    """What a block returns, in order; put together after the last one."""
    dim: int = 1
    """Where tokens lie in those."""
    along: Mapping[str, Along | tuple[Along, ...]]
    """Other arguments with a row for each token; a tuple says it for each entry."""
    attention: Mapping[str, tuple[Attention, ...]]
    """Attribute of a block -> its attention calls, in order. Modules left out work on what they are given."""
    projected: Mapping[str, Joined] = field(default_factory=dict)
    """Attribute of a block -> sequences of an attention that cuts them by itself: it gets all tokens of some heads, from
    behind its `to_q`, `to_k`, `to_v` to before its `to_out.0`."""
    linear: tuple[str, ...] = ()
    """Attributes of a block: attentions whose first matrix product adds up all tokens."""
    convolutions: tuple[str, ...] = ()
    """Submodules of a block with a 3x3 kernel over a picture of tokens, which is cut between its rows."""
    rows: tuple[str, str] | None = None
    """Arguments that are the picture's height and width, where there are convolutions: the height becomes the rank's own."""


@dataclass(frozen=True, kw_only=True)
class SequencePlan:
    blocks: tuple[Blocks, ...]
    heads: tuple[str, ...] = ("num_attention_heads",)
    """Keys of the transformer's config that say how many heads its attentions have."""
    ring: str | None = None
    """Why keys cannot travel round a ring; None where they can."""


@runtime_checkable
class SplitsSequence(Protocol):
    """A family whose tokens can be cut over ranks."""

    sequence_plan: SequencePlan


def self_attention(*joined: str, mask: Literal["whole", "keys", "pairs"] = "whole") -> tuple[Attention]:
    return (Attention(query=joined, key=joined, mask=mask),)


def check_degrees(
    name: str,
    family: object,
    config: Mapping[str, Any],
    *,
    ulysses: int,
    ring: int,
    table: Literal["trainer.parallel", "engine.parallel"] = "trainer.parallel",
) -> None:
    """config: the transformer's config.json. Raises ConfigError, naming key, value and the nearest that fits."""
    if ulysses * ring == 1:
        return
    key, value = ("ulysses", ulysses) if ulysses > 1 else ("ring", ring)
    if not isinstance(family, SplitsSequence):
        raise ConfigError(f"{table}.{key} = {value}: the tokens of {name} cannot be cut over ranks; use 1")
    plan = family.sequence_plan
    if ring > 1 and plan.ring is not None:
        raise ConfigError(f"{table}.ring = {ring}: {name} {plan.ring}; use ring = 1 and ulysses instead")
    heads = [config[entry] for entry in plan.heads if config.get(entry)]
    most = math.gcd(*heads)
    if most % ulysses:
        nearest = min((d for d in range(1, most + 1) if most % d == 0), key=lambda d: (abs(d - ulysses), d))
        raise ConfigError(
            f"{table}.ulysses = {ulysses} does not divide the {', '.join(map(str, heads))} heads of {name}; "
            f"nearest that does: {nearest}"
        )


@dataclass(frozen=True, kw_only=True)
class SequenceGroups:
    """Rank r of `ranks` is member r // U of its ring and member r % U of its Ulysses group, of U members."""

    ranks: dist.ProcessGroup
    ulysses: dist.ProcessGroup
    ring: dist.ProcessGroup


def sequence_mesh(device: str, *, ulysses: int, ring: int) -> DeviceMesh:
    """[data, ring, ulysses] over all ranks of the process group, the last one fastest: what talks most are neighbours."""
    shape = (dist.get_world_size() // (ulysses * ring), ring, ulysses)
    return init_device_mesh(device, shape, mesh_dim_names=("data", "ring", "ulysses"))


def sequence_groups(mesh: DeviceMesh) -> SequenceGroups:
    """Of this rank, on a mesh of `sequence_mesh`."""
    return SequenceGroups(
        ranks=mesh["ring", "ulysses"]._flatten("sequence").get_group(),
        ulysses=mesh.get_group("ulysses"),
        ring=mesh.get_group("ring"),
    )


def split_sequence(model: nn.Module, plan: SequencePlan, groups: SequenceGroups) -> SequenceSplit:
    """From now on `model`'s forward is a collective of `groups.ranks`, whose members give it the same rows."""
    split = SequenceSplit(groups)
    for spec in plan.blocks:
        blocks = list(model.get_submodule(spec.path).children())
        for index, block in enumerate(blocks):
            before = functools.partial(split.before_block, spec=spec, first=index == 0)
            block.register_forward_pre_hook(before, with_kwargs=True)
            for name, calls in spec.attention.items():
                attention = getattr(block, name, None)
                if attention is not None:
                    split.around(attention, functools.partial(_Exchange, split, calls))
            for name, joined in spec.projected.items():
                attention = block.get_submodule(name)
                split.around(attention, functools.partial(split.heads_between_projections, attention, joined))
            for name in spec.linear:
                split.around(block.get_submodule(name), functools.partial(_Sum, groups.ranks))
            for name in spec.convolutions:
                convolution = block.get_submodule(name)
                convolution.register_forward_pre_hook(split.before_convolution)
                convolution.register_forward_hook(split.after_convolution)
        blocks[-1].register_forward_hook(functools.partial(split.after_blocks, spec=spec))
    return split


class SequenceSplit:
    """One transformer's tokens over ranks."""

    def __init__(self, groups: SequenceGroups) -> None:
        self._groups = groups
        self._ranks, self._rank = dist.get_world_size(groups.ranks), dist.get_rank(groups.ranks)
        self._ulysses = dist.get_world_size(groups.ulysses)
        self._sizes: dict[str, list[int]] = {}
        """Sequence -> its tokens on each rank, in the forward that is under way."""
        self._inside: list[AbstractContextManager[Any]] = []

    def remembered(self) -> Callable[[], tuple[AbstractContextManager[None], AbstractContextManager[None]]]:
        """For torch's checkpoint: a block that is computed again finds the lengths of its own forward."""
        sizes = self._sizes

        @contextmanager
        def again() -> Iterator[None]:
            now, self._sizes = self._sizes, sizes
            try:
                yield
            finally:
                self._sizes = now

        return lambda: (nullcontext(), again())

    def before_block(
        self, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], *, spec: Blocks, first: bool
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        bound = inspect.signature(block.forward).bind(*args, **kwargs)
        named = bound.arguments
        if first:
            unit = 1 if spec.rows is None else named[spec.rows[1]]
            self._sizes = {name: self._shares(named[name].shape[spec.dim], unit) for name in spec.tokens}
            for name in spec.tokens:
                named[name] = self._part(named[name], Along(of=(name,), dim=spec.dim))
        for name, along in spec.along.items():
            if named.get(name) is not None:
                named[name] = self._part(named[name], along)
        if spec.rows is not None:
            height, width = spec.rows
            named[height] = self._sizes[spec.tokens[0]][self._rank] // named[width]
        return bound.args, bound.kwargs

    def after_blocks(self, block: nn.Module, args: tuple[Any, ...], output: Any, *, spec: Blocks) -> Any:
        outputs = output if isinstance(output, tuple) else (output,)
        whole = tuple(
            None if x is None else gather_tokens(x, dim=spec.dim, sizes=self._sizes[name], group=self._groups.ranks)
            for name, x in zip(spec.returns, outputs, strict=True)
        )
        return whole if isinstance(output, tuple) else whole[0]

    def around(self, module: nn.Module, enter: Callable[[], AbstractContextManager[Any]]) -> None:
        """Every forward of `module` is made inside of a context."""

        def before(module: nn.Module, args: tuple[Any, ...]) -> None:
            context = enter()
            context.__enter__()
            self._inside.append(context)

        def after(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            self._inside.pop().__exit__(None, None, None)

        module.register_forward_pre_hook(before)
        module.register_forward_hook(after, always_call=True)

    @contextmanager
    def heads_between_projections(self, attention: nn.Module, joined: Joined) -> Iterator[None]:
        """Inside, the projections of `attention` give all tokens and some heads, and its output takes them.

        Hooked for one forward only: a LoRA that comes later wraps the projections.
        """
        rows, group = self._rows(joined), self._groups.ulysses

        def whole(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
            (heads,) = to_heads([output.unflatten(-1, (self._ulysses, -1)).transpose(1, 2)], [rows], group)
            return heads.squeeze(1)

        def own(module: nn.Module, args: tuple[Any, ...]) -> tuple[Tensor]:
            return (to_tokens(args[0].unsqueeze(1), rows, group).transpose(1, 2).flatten(2),)

        inputs = [attention.get_submodule(name) for name in ("to_q", "to_k", "to_v")]
        handles = [module.register_forward_hook(whole) for module in inputs]
        handles.append(attention.get_submodule("to_out.0").register_forward_pre_hook(own))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def before_convolution(self, module: nn.Module, args: tuple[Tensor]) -> tuple[Tensor]:
        """[B, C, own rows, W] and the neighbours' next rows."""
        (x,) = args
        edges = torch.cat([x[:, :, :1], x[:, :, -1:]], dim=2)
        edges = gather_tokens(edges, dim=2, sizes=[2] * self._ranks, group=self._groups.ranks)
        above, below = 2 * self._rank - 1, 2 * self._rank + 2
        return (torch.cat([edges[:, :, max(above, 0) : above + 1], x, edges[:, :, below : below + 1]], dim=2),)

    def after_convolution(self, module: nn.Module, args: tuple[Tensor], output: Tensor) -> Tensor:
        first, last = int(self._rank > 0), int(self._rank < self._ranks - 1)
        return output[:, :, first : output.shape[2] - last]

    def attend(
        self,
        call: Attention,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        """torch's scaled_dot_product_attention of the whole sequences, for this rank's queries [B, H, n, D]."""
        if key.shape[1] % self._ulysses or (key.shape[1] != query.shape[1] and self._ring_size > 1):
            key, value = (x.repeat_interleave(query.shape[1] // key.shape[1], dim=1) for x in (key, value))
        group, rows = self._groups.ulysses, self._rows(call.query)
        keys = self._rows(call.key)
        query, key, value = to_heads([query, key, value], [rows, keys, keys], group)
        if self._ring_size == 1:
            mask = None if attn_mask is None else self._whole_mask(attn_mask, call)
            out = F.scaled_dot_product_attention(
                query,
                key,
                value,
                attn_mask=mask,
                dropout_p=dropout_p,
                is_causal=is_causal,
                scale=scale,
                enable_gqa=enable_gqa and key.shape[1] != query.shape[1],
            )
        else:
            if attn_mask is not None or is_causal:
                raise InvariantError("an attention with a mask cannot be cut over a ring; the family's plan allows it")
            lengths = [sum(map(sum, self._rows(call.key, ring=member))) for member in range(self._ring_size)]
            out = ring_attention(query, key, value, lengths=lengths, group=self._groups.ring, scale=scale)
        return to_tokens(out, rows, group)

    @property
    def _ring_size(self) -> int:
        return self._ranks // self._ulysses

    def _shares(self, size: int, unit: int) -> list[int]:
        """Tokens on each rank: whole units."""
        shares = [unit * count for count in shard_sizes(size // unit, self._ranks)]
        if unit > 1 and not all(shares):
            raise ConfigError(
                f"latents of {size // unit} rows of tokens cannot be cut over {self._ranks} ranks, of which each needs a row: "
                "use larger pictures, or fewer ranks of a sequence"
            )
        return shares

    def _rows(self, joined: Joined, *, ring: int | None = None) -> list[list[int]]:
        """Tokens of each joined sequence on each member of a Ulysses group: mine, or that of ring member `ring`."""
        first = (self._rank // self._ulysses if ring is None else ring) * self._ulysses
        return [[self._sizes[name][first + member] for name in joined] for member in range(self._ulysses)]

    def _part(self, value: Any, along: Along | tuple[Along, ...]) -> Any:
        """This rank's rows."""
        if isinstance(along, tuple):
            return tuple(self._part(entry, its) for entry, its in zip(value, along, strict=True))
        if isinstance(value, tuple | list):
            return type(value)(self._part(entry, along) for entry in value)
        if not isinstance(value, Tensor) or along.ndim not in (None, value.ndim) or value.shape[along.dim] == 1:
            return value
        pieces = []
        for name, piece in zip(
            along.of, value.split([sum(self._sizes[n]) for n in along.of], dim=along.dim), strict=True
        ):
            counts = self._sizes[name]
            pieces.append(piece.narrow(along.dim, sum(counts[: self._rank]), counts[self._rank]))
        return torch.cat(pieces, dim=along.dim) if len(pieces) > 1 else pieces[0]

    def _whole_mask(self, mask: Tensor, call: Attention) -> Tensor:
        if call.mask == "whole":
            return mask
        own = mask.diagonal(dim1=-2, dim2=-1) if call.mask == "pairs" else mask[..., 0, :]
        counts = [self._sizes[name] for name in call.key]
        pieces = own.split([count[self._rank] for count in counts], dim=-1)
        keys = torch.cat(
            [
                gather_tokens(piece.contiguous(), dim=own.ndim - 1, sizes=count, group=self._groups.ranks)
                for piece, count in zip(pieces, counts, strict=True)
            ],
            dim=-1,
        )
        return keys.unsqueeze(-1) & keys.unsqueeze(-2) if call.mask == "pairs" else keys.unsqueeze(-2)


class _Sum(TorchFunctionMode):
    """Inside a linear attention: what its first matrix product adds up, it adds up over all ranks."""

    def __init__(self, ranks: dist.ProcessGroup) -> None:
        super().__init__()
        self._ranks, self._done = ranks, False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is not torch.matmul or self._done:
            return result
        self._done = True
        return sum_over_ranks(result, group=self._ranks)


class _Exchange(TorchFunctionMode):
    """Inside one attention module: each call of torch's attention is made over whole sequences."""

    def __init__(self, split: SequenceSplit, calls: tuple[Attention, ...]) -> None:
        super().__init__()
        self._split, self._calls = split, iter(calls)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.scaled_dot_product_attention:
            return self._split.attend(next(self._calls), *args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))
