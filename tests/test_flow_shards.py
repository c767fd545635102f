"""Sequence parallelism: every rank holds the unsharded rollout's noise, log-probs and trajectory, bit for bit."""

from __future__ import annotations

import multiprocessing
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from verst.flow.controller import RolloutOptions, make_transition
from verst.flow.denoise import denoise
from verst.flow.hooks import RolloutResult, Stream, prepare_rollout
from verst.flow.noise import SampleNoise
from verst.flow.scheduler import FlowMatchEulerDiscreteScheduler
from verst.flow.shards import sequence_shards, shard_sizes
from verst.types import Latents

SEEDS, SHAPES = (1, 2), {"visual": ((3, 5, 4), 2), "audio": ((7, 2), 1), "text": ((1, 3), 1)}
"""stream -> (shape of one sample, dimension of [B, ...] that is cut); "text" leaves the second rank nothing."""


@given(size=st.integers(0, 40), world_size=st.integers(1, 9))
@settings(max_examples=50, deadline=None)
def test_shards_are_even_but_for_one(size: int, world_size: int) -> None:
    sizes = shard_sizes(size, world_size)
    assert (len(sizes), sum(sizes)) == (world_size, size)
    assert max(sizes) - min(sizes) <= 1
    assert sizes == sorted(sizes, reverse=True)


def rolled_out(kind: str, storage: torch.dtype, group: Any) -> RolloutResult:
    """group None: unsharded."""
    noise, schedulers, streams, latents = SampleNoise(SEEDS), {}, [], {}
    for name, (shape, dim) in SHAPES.items():
        schedulers[name] = FlowMatchEulerDiscreteScheduler(shift=3.0)
        schedulers[name].set_timesteps(4)
        full = noise.initial(shape)
        shards = None if group is None else sequence_shards(size=shape[dim - 1], dim=dim, group=group)
        steps = noise.steps(name, first=not streams)
        streams.append(
            Stream(
                name=name, sigmas=schedulers[name].sigmas, latent_shape=tuple(full.shape), noise=steps, shards=shards
            )
        )
        latents[name] = full if shards is None else shards.shard(full)

    def velocity(x: Latents, sigmas: dict[str, torch.Tensor]) -> Latents:
        return {name: (torch.sign(v) - v * v).bfloat16() for name, v in ((n, x[n].float()) for n in x)}

    asked = RolloutOptions(
        transition=make_transition(kind, 0.7), sde_step_indices=(0, 2), storage_dtype=storage, debug=True
    )
    rollout = prepare_rollout(asked, streams)
    final = denoise(velocity, latents, schedulers, transitions=rollout.transitions)
    return rollout.finalize(final, {name: s.timesteps for name, s in schedulers.items()})


def same(one: RolloutResult, other: RolloutResult) -> bool:
    paths = all(
        torch.equal(a.latents, b.latents) and torch.equal(a.log_probs, b.log_probs) and a.latents.shape[0] == 5
        for name in SHAPES
        for a, b in zip(one.trajectories[name], other.trajectories[name], strict=True)
    )
    return paths and all(
        torch.equal(one.debug[name][key][step], other.debug[name][key][step])
        for name in SHAPES
        for key in ("noise", "mean", "std", "model_output")
        for step in (0, 2)
    )


def on_rank(rank: int, world_size: int, store: str) -> None:
    """What the process of one rank does: both rollouts, compared."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, world_size), rank=rank, world_size=world_size)
    for kind in ("sde", "cps", "dance"):
        for storage in (torch.float32, torch.bfloat16):
            assert same(rolled_out(kind, storage, dist.group.WORLD), rolled_out(kind, storage, None)), (kind, storage)
    with pytest.raises(ValueError, match="dim = 0"):
        sequence_shards(size=4, dim=0, group=dist.group.WORLD)
    dist.destroy_process_group()


def test_every_rank_holds_the_unsharded_rollout(tmp_path: Path) -> None:
    """Two processes over gloo; forked, because importing diffusers anew takes seconds."""
    context = multiprocessing.get_context("fork")
    ranks = [context.Process(target=on_rank, args=(rank, 2, str(tmp_path / "store"))) for rank in range(2)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(timeout=120)
    assert [rank.exitcode for rank in ranks] == [0, 0]
