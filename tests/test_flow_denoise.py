"""The loop and its hooks: plain sampling untouched, shared schedulers undisturbed, all streams or none."""

from __future__ import annotations

import threading
from typing import Any

import diffusers
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from verst.errors import ConfigError, InvariantError
from verst.flow.controller import FlowRolloutController, RolloutOptions, make_transition
from verst.flow.denoise import denoise
from verst.flow.guidance import classifier_free, in_two_passes
from verst.flow.hooks import Rollout, RolloutResult, Stream, build_controller, prepare_rollout
from verst.flow.noise import SampleNoise
from verst.flow.scheduler import FlowMatchEulerDiscreteScheduler
from verst.types import Conditioning, Geometry, Latents

SEEDS = (3, 4)
SHAPES = {"visual": (2, 3, 4), "audio": (5, 2)}
GRIDS = {"visual": 3.0, "audio": 1.5}


def grids(num_steps: int = 4, **changes: Any) -> dict[str, FlowMatchEulerDiscreteScheduler]:
    made = {name: FlowMatchEulerDiscreteScheduler(shift=shift, **changes) for name, shift in GRIDS.items()}
    for scheduler in made.values():
        scheduler.set_timesteps(num_steps)
    return made


def noise_of(shapes: dict[str, tuple[int, ...]]) -> tuple[SampleNoise, Latents]:
    noise = SampleNoise(SEEDS)
    return noise, {name: noise.initial(shape) for name, shape in shapes.items()}


def joint(x: Latents, sigmas: dict[str, Tensor]) -> Latents:
    """Each stream's velocity depends on the other's latents, as in a joint transformer."""
    mean = {name: value.flatten(1).mean(1) for name, value in x.items()}
    other = {"visual": mean["audio"].view(-1, 1, 1, 1), "audio": mean["visual"].view(-1, 1, 1)}
    return {name: torch.tanh(value) + other[name] * sigmas[name][0] for name, value in x.items()}


def options(**changes: Any) -> RolloutOptions:
    return RolloutOptions(**{"transition": make_transition("sde", 0.7), **changes})


def prepared(schedulers: dict[str, FlowMatchEulerDiscreteScheduler], asked: RolloutOptions) -> tuple[Rollout, Latents]:
    noise, latents = noise_of(SHAPES)
    streams = [
        Stream(
            name=name,
            sigmas=schedulers[name].sigmas,
            latent_shape=tuple(x.shape),
            noise=noise.steps(name, first=name == "visual"),
        )
        for name, x in latents.items()
    ]
    return prepare_rollout(asked, streams), latents


def joint_rollout(asked: RolloutOptions) -> RolloutResult:
    schedulers = grids()
    rollout, latents = prepared(schedulers, asked)
    final = denoise(joint, latents, schedulers, transitions=rollout.transitions)
    return rollout.finalize(final, {name: s.timesteps for name, s in schedulers.items()})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_serving_is_the_plain_scheduler_bit_for_bit(dtype: torch.dtype) -> None:
    rollout = prepare_rollout(None, [])
    assert rollout.transitions == {}
    rollout.init(Conditioning(positive={"a": torch.ones(1)}, negative=None))

    def velocity(x: Latents, sigmas: dict[str, Tensor]) -> Latents:
        return {"visual": (torch.sin(2 * x["visual"].float()) * sigmas["visual"][0]).to(dtype)}

    _, latents = noise_of({"visual": SHAPES["visual"]})
    ours = denoise(velocity, latents, {"visual": grids()["visual"]}, transitions=rollout.transitions)
    assert rollout.finalize(ours, {}) == RolloutResult()
    plain = diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0)
    plain.set_timesteps(4)
    x = latents["visual"]
    for i, timestep in enumerate(plain.timesteps):
        v = velocity({"visual": x}, {"visual": plain.sigmas[i : i + 1]})["visual"]
        x = plain.step(v, timestep, x, return_dict=False)[0]
    assert torch.equal(ours["visual"], x)


def test_streams_have_their_own_grid_noise_log_probs_and_trajectory() -> None:
    result = joint_rollout(options(debug=True))
    visual, audio = (result.trajectories[name] for name in ("visual", "audio"))
    assert visual[0].latents.shape == (5, *SHAPES["visual"])
    assert audio[0].latents.shape == (5, *SHAPES["audio"])
    assert torch.equal(visual[0].sigmas, grids()["visual"].sigmas)
    assert torch.equal(audio[0].sigmas, grids()["audio"].sigmas)
    assert not torch.equal(visual[0].sigmas, audio[0].sigmas)
    assert not torch.equal(visual[0].log_probs, audio[0].log_probs)
    draws = [result.debug[name]["noise"][step].flatten()[:6] for name in SHAPES for step in range(4)]
    assert all(not torch.equal(a, b) for i, a in enumerate(draws) for b in draws[:i])
    # The joint state replays: one velocity of both latents gives both means.
    for step in range(4):
        x = {n: torch.stack([p.latent_at(step) for p in result.trajectories[n]]) for n in SHAPES}
        v = joint(x, {n: result.trajectories[n][0].sigmas[step].expand(2) for n in SHAPES})
        for name in SHAPES:
            assert torch.equal(v[name], result.debug[name]["model_output"][step])


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (
            lambda v: {"visual": v["visual"]},
            r"the velocity have the streams \['visual'\], the schedulers \['audio', 'vis",
        ),
        (lambda v: {**v, "depth": v["audio"]}, "depth"),
        (lambda v: {}, r"\[\]"),
    ],
)
@pytest.mark.parametrize("serving", [True, False])
def test_a_stream_too_few_or_too_many_is_an_error(wrong: Any, message: str, serving: bool) -> None:
    schedulers = grids()
    rollout, latents = prepared(schedulers, options())
    transitions = {} if serving else rollout.transitions
    with pytest.raises(InvariantError, match=message):
        denoise(lambda x, s: wrong(joint(x, s)), latents, schedulers, transitions=transitions)
    with pytest.raises(InvariantError, match="the latents"):
        denoise(joint, {"visual": latents["visual"]}, schedulers)
    with pytest.raises(InvariantError, match="the transitions"):
        denoise(joint, latents, schedulers, transitions={"visual": rollout.transitions["visual"]})
    with pytest.raises(InvariantError, match=r"without the streams \['audio'\]"):
        rollout.finalize({"visual": latents["visual"]}, {})


def test_streams_of_unlike_length_are_refused() -> None:
    schedulers = grids()
    schedulers["audio"].set_timesteps(3)
    with pytest.raises(InvariantError, match=r"equally many steps, not \[3, 4\]"):
        denoise(joint, noise_of(SHAPES)[1], schedulers)


def test_two_requests_on_one_scheduler_do_not_disturb_each_other() -> None:
    """Step by step in turn, one a rollout and one not, while the shared object gets another grid."""
    shared = grids()
    alone = {
        "rollout": joint_rollout(options()).trajectories["visual"][0].latents,
        "serving": denoise(joint, noise_of(SHAPES)[1], grids())["visual"],
    }
    turn = threading.Barrier(2, timeout=20)
    results: dict[str, Tensor] = {}

    def in_turn(x: Latents, sigmas: dict[str, Tensor]) -> Latents:
        turn.wait()
        return joint(x, sigmas)

    def rolled() -> None:
        rollout, latents = prepared(shared, options())
        final = denoise(in_turn, latents, shared, transitions=rollout.transitions)
        times = {name: torch.zeros(4) for name in SHAPES}
        results["rollout"] = rollout.finalize(final, times).trajectories["visual"][0].latents

    def served() -> None:
        def regridding(x: Latents, sigmas: dict[str, Tensor]) -> Latents:
            if len(calls) == 2:
                for scheduler in shared.values():
                    scheduler.set_timesteps(9)
            calls.append(1)
            return in_turn(x, sigmas)

        calls: list[int] = []
        results["serving"] = denoise(regridding, noise_of(SHAPES)[1], shared)["visual"]

    threads = [threading.Thread(target=work) for work in (rolled, served)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert torch.equal(results["rollout"], alone["rollout"])
    assert torch.equal(results["serving"], alone["serving"])
    assert {s.step_index for s in shared.values()} == {None}


@settings(max_examples=30, deadline=None)
@given(
    sigmas=st.lists(st.integers(10, 9990).map(lambda n: n / 10007), min_size=1, max_size=6, unique=True),
    shift=st.floats(0.5, 8.0),
)
def test_fractional_timesteps_are_never_made_integers(sigmas: list[float], shift: float) -> None:
    scheduler = FlowMatchEulerDiscreteScheduler(shift=shift)
    scheduler.set_timesteps(sigmas=[1.0, *sorted(sigmas, reverse=True)])
    seen = []

    def velocity(x: Latents, sigma: dict[str, Tensor]) -> Latents:
        seen.append(sigma["visual"][0])
        return {"visual": x["visual"]}

    noise, latents = noise_of({"visual": SHAPES["visual"]})
    stream = Stream(
        name="visual", sigmas=scheduler.sigmas, latent_shape=(2, *SHAPES["visual"]), noise=noise.steps("visual")
    )
    rollout = prepare_rollout(options(transition=make_transition("dance", 0.3)), [stream])
    final = denoise(velocity, latents, {"visual": scheduler}, transitions=rollout.transitions)
    path = rollout.finalize(final, {"visual": scheduler.timesteps}).trajectories["visual"][0]
    assert path.timesteps.dtype == path.sigmas.dtype == torch.float32
    assert torch.equal(torch.stack(seen), scheduler.sigmas[:-1])
    assert torch.equal(path.sigmas, scheduler.sigmas)
    assert torch.equal(path.timesteps[:-1], scheduler.timesteps)
    torch.testing.assert_close(path.timesteps, path.sigmas * 1000, rtol=1e-6, atol=0)


@pytest.mark.parametrize("timestep", [3, torch.tensor(3), torch.tensor([3], dtype=torch.int32), 2.5])
def test_an_index_is_no_timestep(timestep: Any) -> None:
    scheduler, x = grids()["visual"], torch.zeros(1, 2)
    with pytest.raises(ValueError, match="timestep"):
        scheduler.step(x, timestep, x, transition=lambda **_: x)


def test_equal_timesteps_do_not_lead_the_loop_astray() -> None:
    """diffusers looks a first timestep up by value, and takes the second of two equal ones."""
    scheduler = FlowMatchEulerDiscreteScheduler(shift=1.0)
    scheduler.set_timesteps(sigmas=[1.0, 0.5])
    scheduler.timesteps = torch.tensor([500.0, 500.0])
    x = {"visual": torch.ones(1, 1)}
    assert denoise(lambda x, s: {"visual": torch.ones(1, 1)}, x, {"visual": scheduler})["visual"].item() == 0.0


def test_init_keeps_the_conditioning_as_it_was() -> None:
    schedulers = grids()
    rollout, latents = prepared(schedulers, options(keep_conditioning=True))
    rows = Conditioning(
        positive={"text": torch.ones(2, 3)}, negative={"text": torch.zeros(2, 3)}, geometry=Geometry(height=8, width=8)
    )
    rollout.init(rows)

    def velocity(x: Latents, sigmas: dict[str, Tensor]) -> Latents:
        rows.positive["text"].add_(1)  # a model may scale what it is given in place
        return joint(x, sigmas)

    final = denoise(velocity, latents, schedulers, transitions=rollout.transitions)
    kept = rollout.finalize(final, {name: s.timesteps for name, s in schedulers.items()}).conditioning
    assert kept is not None
    assert kept.negative is not None
    assert torch.equal(kept.positive["text"], torch.ones(2, 3))
    assert torch.equal(kept.negative["text"], torch.zeros(2, 3))
    assert kept.geometry == rows.geometry
    assert rollout.controllers == {}
    rollout, _ = prepared(schedulers, options())
    rollout.init(rows)
    assert rollout._conditioning is None


def test_a_loop_with_its_own_update_brings_its_own_builder() -> None:
    """Its sigmas run on another grid, it never sees a scheduler, and its deterministic step is its own."""
    own_grid = torch.tensor([1.0, 0.9, 0.4, 0.0])

    def half(*, model_output: Tensor, sample: Tensor, step_index: int) -> Tensor:
        return sample - model_output / (step_index + 2)

    def build(stream: Stream, asked: RolloutOptions) -> FlowRolloutController:
        return FlowRolloutController(
            options=asked,
            sigmas=own_grid,
            latent_shape=stream.latent_shape,
            noise=stream.noise,
            ode_transition=half,
        )

    noise, latents = noise_of({"visual": SHAPES["visual"]})
    stream = Stream(name="visual", sigmas=torch.empty(0), latent_shape=(2, *SHAPES["visual"]), noise=noise.steps("v"))
    rollout = prepare_rollout(options(sde_step_indices=(1,)), [stream], build=build)
    x = latents["visual"]
    for i in range(3):
        x = rollout.transitions["visual"](
            model_output=x.sin(), sample=x, sigma=own_grid[i], next_sigma=own_grid[i + 1], step_index=i
        )
    path = rollout.finalize({"visual": x}, {"visual": own_grid[:-1] * 1000}).trajectories["visual"][0]
    assert torch.equal(path.sigmas, own_grid)
    start = latents["visual"][0]
    assert torch.equal(path.latent_at(1), start - start.sin() / 2)
    assert path.log_probs[1] != 0
    assert not path.log_probs[[0, 2]].any()


def test_options_that_a_grid_cannot_carry_out_are_refused_before_the_loop() -> None:
    with pytest.raises(ConfigError, match="leaves no noise"):
        prepared(grids(), options(transition=make_transition("cps", 0.8)))
    stream = Stream(name="v", sigmas=grids()["visual"].sigmas, latent_shape=(1, 2), noise=SampleNoise([1]).steps("v"))
    assert build_controller(stream, options()).debug_tensors == {}


def test_guidance_in_two_passes() -> None:
    rows = Conditioning(positive={"c": torch.tensor([2.0])}, negative={"c": torch.tensor([-1.0])})
    seen = []

    def velocity(given: Conditioning) -> Latents:
        assert given.negative is None
        seen.append(given.positive["c"].item())
        return {"visual": given.positive["c"] * 3}

    assert in_two_passes(velocity, rows, 4.0)["visual"].item() == -3 + 4 * (6 - -3)
    assert seen == [-1, 2]
    assert classifier_free(torch.tensor(6.0), torch.tensor(-3.0), 1.0) == 6
    with pytest.raises(InvariantError, match="negative prompt"):
        in_two_passes(velocity, Conditioning(positive={}, negative=None), 4.0)
