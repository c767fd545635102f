"""The controller of one stream: what is stored, fed on and scored is one value; what is kept, and what is refused."""

from __future__ import annotations

from typing import Any

import flow_reference
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from verst.errors import ConfigError, InvariantError
from verst.flow.controller import FlowRolloutController, RolloutOptions, make_transition
from verst.flow.noise import SampleNoise, derive_seed
from verst.flow.scheduler import FlowMatchEulerDiscreteScheduler
from verst.types import StreamTrajectory

SHAPE, SEEDS, NUM_STEPS = (2, 5, 3), (7, 8), 4


def grid(num_steps: int = NUM_STEPS, *, shift: float = 3.0) -> FlowMatchEulerDiscreteScheduler:
    scheduler = FlowMatchEulerDiscreteScheduler(shift=shift)
    scheduler.set_timesteps(num_steps)
    return scheduler


def controller(sigmas: Tensor, *, kind: str = "sde", eta: float = 0.7, ode: Any = None, **options: Any) -> Any:
    noise = SampleNoise(SEEDS)
    noise.initial(SHAPE)
    return FlowRolloutController(
        options=RolloutOptions(transition=make_transition(kind, eta), **options),
        sigmas=sigmas,
        latent_shape=(len(SEEDS), *SHAPE),
        noise=noise.steps("visual"),
        ode_transition=ode,
    )


def answer(x: Tensor, sigma: Tensor) -> Tensor:
    return torch.sin(3 * x) + sigma * x


def rolled_out(
    *, dtype: torch.dtype = torch.float32, num_steps: int = NUM_STEPS, **changes: Any
) -> tuple[FlowRolloutController, list[Tensor], list[StreamTrajectory]]:
    """The controller, what was fed to the model at each step with the final latent behind it, and the trajectories."""
    scheduler = grid(num_steps)
    made = controller(scheduler.sigmas, **changes)
    x = SampleNoise(SEEDS).initial(SHAPE).to(changes.get("storage_dtype", torch.float32)).to(dtype)
    fed = []
    for i, timestep in enumerate(scheduler.timesteps):
        fed.append(x)
        v = answer(x.float(), scheduler.sigmas[i]).to(dtype)
        x = scheduler.step(v, timestep, x, transition=made.transition, return_dict=False)[0]
        assert x.dtype == dtype
    return made, [*fed, x], made.finalize(x, timesteps=scheduler.timesteps)


@pytest.mark.parametrize("kind", ["sde", "cps", "dance"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("storage", [torch.float32, torch.bfloat16, torch.float16])
def test_one_value_is_recorded_fed_on_and_scored(kind: str, dtype: torch.dtype, storage: torch.dtype) -> None:
    """Also where the scheduler casts to the model output's dtype behind the transition."""
    steps = tuple(range(NUM_STEPS - 1)) if kind == "cps" else None
    _, fed, paths = rolled_out(kind=kind, dtype=dtype, storage_dtype=storage, sde_step_indices=steps, debug=True)
    sigmas = paths[0].sigmas
    for row, path in enumerate(paths):
        assert path.latents.dtype == storage
        for step in range(NUM_STEPS + 1):
            assert torch.equal(path.latent_at(step).float(), fed[step][row].float())
        for step in path.sde_step_indices:
            x, x_next = fed[step][row : row + 1].float(), path.latent_at(step + 1)[None].float()
            v = answer(x, sigmas[step]).to(dtype)
            s, s_next, first = (float(sigmas[i]) for i in (step, step + 1, 1))
            mean, std = flow_reference.step(kind, 0.7, x, v, sigma=s, next_sigma=s_next, first_sigma=first)
            exact = float(flow_reference.log_prob(x_next, mean, std))
            assert float(path.log_probs[step]) == pytest.approx(exact, rel=1e-6, abs=1e-6)


def test_log_prob_of_the_noise_does_not_see_the_rounding() -> None:
    kept: dict[str, Any] = {"dtype": torch.bfloat16, "storage_dtype": torch.bfloat16, "debug": True}
    made, _, stored = rolled_out(**kept)
    _, _, drawn = rolled_out(**kept, log_prob_of="noise")
    _, _, exact = rolled_out(log_prob_of="noise")
    assert torch.equal(stored[0].latents, drawn[0].latents)
    assert not torch.equal(stored[0].log_probs, drawn[0].log_probs)
    # Of the noise alone: neither the storage dtype nor the weights come in.
    assert torch.equal(drawn[0].log_probs, exact[0].log_probs)
    for step in range(NUM_STEPS):
        noise, std = (made.debug_tensors[name][step][:1].double() for name in ("noise", "std"))
        value = flow_reference.log_prob(noise * std, torch.zeros_like(noise), float(std.flatten()[0]))
        assert float(drawn[0].log_probs[step]) == pytest.approx(float(value), rel=1e-6)


def test_reductions_and_the_log_prob_without_constants() -> None:
    made, _, mean = rolled_out(debug=True)
    _, _, total = rolled_out(log_prob_reduction="sum")
    _, _, plain = rolled_out(log_prob_no_const=True)
    torch.testing.assert_close(total[0].log_probs, mean[0].log_probs * 30, rtol=1e-5, atol=1e-5)
    for step in range(NUM_STEPS):
        difference = plain[1].latent_at(step + 1) - made.debug_tensors["mean"][step][1]
        assert float(plain[1].log_probs[step]) == pytest.approx(-float((difference**2).mean()), rel=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_deterministic_rollout_is_the_plain_scheduler_bit_for_bit(dtype: torch.dtype) -> None:
    _, fed, paths = rolled_out(kind="ode", dtype=dtype)
    scheduler, x = grid(), SampleNoise(SEEDS).initial(SHAPE).to(dtype)
    for i, timestep in enumerate(scheduler.timesteps):
        assert torch.equal(x, fed[i])
        v = answer(x.float(), scheduler.sigmas[i]).to(dtype)
        x = scheduler.step(v, timestep, x, return_dict=False)[0]
    assert torch.equal(x, fed[-1])
    assert not torch.stack([p.log_probs for p in paths]).any()
    assert paths[0].sde_step_indices == ()


@settings(max_examples=30, deadline=None)
@given(steps=st.sets(st.integers(0, 5)), kept=st.sets(st.integers(0, 6)), kind=st.sampled_from(["sde", "dance"]))
def test_filters_choose_steps_and_latents(steps: set[int], kept: set[int], kind: str) -> None:
    options: dict[str, Any] = {"kind": kind, "num_steps": 6, "sde_step_indices": tuple(steps)}
    made, fed, paths = rolled_out(**options, return_step_indices=tuple(kept), debug=True)
    path = paths[1]
    assert path.sde_step_indices == tuple(sorted(steps))
    assert path.latent_step_indices.tolist() == sorted(kept)
    assert path.latents.shape == (len(kept), *SHAPE)
    for index in kept:
        assert torch.equal(path.latent_at(index), fed[index][1])
    # The grid covers every step, whatever is kept.
    assert path.sigmas.shape == path.timesteps.shape == (7,)
    assert torch.equal(path.timesteps[:-1], grid(6).timesteps)
    assert (path.sigmas[-1], path.timesteps[-1]) == (0, 0)
    assert path.log_probs.shape == (6,)
    assert {i for i in range(6) if path.log_probs[i] != 0} == steps
    assert {name: set(values) for name, values in made.debug_tensors.items()} == (
        dict.fromkeys(("noise", "mean", "std", "model_output"), steps) if steps else {}
    )


def test_the_noise_of_a_step_is_the_next_draw_whatever_steps_come_before() -> None:
    """The k-th stochastic step takes the k-th draw: a window at the end starts with the first one."""
    late, _, _ = rolled_out(sde_step_indices=(2, 3), debug=True)
    whole, _, _ = rolled_out(debug=True)
    for first, step in enumerate((2, 3)):
        assert torch.equal(late.debug_tensors["noise"][step], whole.debug_tensors["noise"][first])


def test_noise_of_a_sample_is_the_same_in_every_batch() -> None:
    alone, pair = SampleNoise([8]), SampleNoise([7, 8])
    assert torch.equal(alone.initial(SHAPE)[0], pair.initial(SHAPE)[1])
    for stream, first in (("visual", True), ("audio", False)):
        one, two = alone.steps(stream, first=first), pair.steps(stream, first=first)
        for _ in range(2):
            assert torch.equal(one(SHAPE)[0], two(SHAPE)[1])


def test_streams_draw_apart_from_each_other() -> None:
    quiet, busy = SampleNoise(SEEDS), SampleNoise(SEEDS)
    assert torch.equal(quiet.initial(SHAPE), busy.initial(SHAPE))
    audio = busy.steps("audio", first=False)
    sound = [audio(SHAPE) for _ in range(3)]
    visual = [draw(SHAPE) for draw in [busy.steps("visual")] * 3]
    alone = [draw(SHAPE) for draw in [quiet.steps("visual")] * 3]
    assert all(torch.equal(a, b) for a, b in zip(visual, alone, strict=True))
    draws = [*sound, *visual, busy.steps("other", first=False)(SHAPE)]
    assert all(not torch.equal(a, b) for i, a in enumerate(draws) for b in draws[:i])
    generator = torch.Generator().manual_seed(derive_seed(SEEDS[0], "stream", "audio"))
    assert torch.equal(sound[0][:1], torch.randn((1, *SHAPE), generator=generator))


def test_a_models_own_update_is_used_on_deterministic_steps_alone() -> None:
    asked = []

    def own(*, model_output: Tensor, sample: Tensor, step_index: int) -> Tensor:
        asked.append(step_index)
        return 0.5 * sample - 0.25 * model_output

    _, fed, paths = rolled_out(ode=own, sde_step_indices=(1,), storage_dtype=torch.bfloat16)
    assert asked == [0, 2, 3]
    expected = 0.5 * fed[2] - 0.25 * answer(fed[2], paths[0].sigmas[2])
    assert torch.equal(fed[3], expected.bfloat16().float())
    assert not paths[0].log_probs[[0, 2, 3]].any()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kind": "cps"}, r"sde_step_indices has 3, .* to 0 leaves no noise .*leave the step out"),
        ({"kind": "cps", "sde_step_indices": (0, 3)}, "sde_step_indices has 3"),
        ({"kind": "sde", "eta": 0.0}, "sde_step_indices has 0"),
        ({"kind": "ode", "sde_step_indices": (1,)}, "sde_step_indices has 1"),
        ({"kind": "cps", "log_prob_of": "noise"}, "no log-prob"),
        ({"sde_step_indices": (4,)}, r"sde_step_indices \[4\] outside 0..3"),
        ({"return_step_indices": (5,)}, r"return_step_indices \[5\] outside 0..4"),
    ],
)
def test_a_step_without_noise_or_outside_the_grid_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        controller(grid().sigmas, **options)


@pytest.mark.parametrize("options", [{"kind": "cps"}, {"eta": 0.0}])
def test_without_constants_a_step_may_have_no_noise(options: dict[str, Any]) -> None:
    _, fed, paths = rolled_out(**options, log_prob_no_const=True)
    assert torch.stack([p.log_probs for p in paths]).isfinite().all()
    last = fed[3] + (0 - paths[0].sigmas[3]) * answer(fed[3], paths[0].sigmas[3])
    torch.testing.assert_close(fed[4], last, atol=1e-6, rtol=1e-6)


def test_steps_are_made_once_in_order_and_all() -> None:
    scheduler = grid()
    made, x = controller(scheduler.sigmas), SampleNoise(SEEDS).initial(SHAPE)
    call: dict[str, Any] = {"model_output": x, "sample": x, "sigma": scheduler.sigmas[0]}
    made.transition(**call, next_sigma=scheduler.sigmas[1], step_index=0)
    with pytest.raises(InvariantError, match="step 0 of a rollout of 4 steps, 1 of which are done"):
        made.transition(**call, next_sigma=scheduler.sigmas[1], step_index=0)
    with pytest.raises(InvariantError, match="1 of the 4 steps"):
        made.finalize(x, timesteps=scheduler.timesteps)
    with pytest.raises(InvariantError, match="one sigma for all tokens"):
        made.transition(**{**call, "sigma": scheduler.sigmas[:2]}, next_sigma=scheduler.sigmas[1], step_index=1)
    with pytest.raises(InvariantError, match="the full latent"):
        made.transition(
            model_output=x[:, :1],
            sample=x[:, :1],
            sigma=scheduler.sigmas[1],
            next_sigma=scheduler.sigmas[2],
            step_index=1,
        )
