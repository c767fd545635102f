"""Each algorithm: its loss against a formula written once more, its gradient by finite differences, its pairs."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from verst.algorithms import make_algorithm
from verst.algorithms.awm import awm_loss, weighted_error
from verst.algorithms.base import Role, ScoredGroup
from verst.algorithms.dpo import dpo_loss
from verst.algorithms.grpo_guard import guarded_loss
from verst.algorithms.pairs import PairBlock, Tile
from verst.algorithms.sft import matching_error, velocity_loss
from verst.config import sections as s
from verst.config.watch import ClipFractionAlarm, KlAlarm, RatioDriftAlarm, why_silent
from verst.flow.controller import make_transition
from verst.flow.transitions import StepDistribution
from verst.trainer.policies import distribution_of
from verst.types import Conditioning, Group, Latents, Microgroup, Sample, SampleKey, Scores, StreamTrajectory

CLIP = 0.05
DOUBLE = torch.float64


def drawn(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=DOUBLE)


def test_guarded_loss_is_the_papers() -> None:
    mean, old_mean, x = (drawn(3, 2, 4, seed=i) for i in range(3))
    std, dt = torch.tensor([0.3, 0.7, 1.1], dtype=DOUBLE), torch.tensor([-0.1, -0.2, -0.4], dtype=DOUBLE)
    advantage = torch.tensor([1.5, -0.7, -2.0], dtype=DOUBLE)
    log_probs = [torch.distributions.Normal(m, std.view(3, 1, 1)).log_prob(x) for m in (mean, old_mean)]
    new, old = (value.mean(dim=(1, 2)) for value in log_probs)
    got = guarded_loss(
        new, old, advantage, mean=mean, old_mean=old_mean, std=std, dt=dt, clip_low=CLIP, clip_high=2 * CLIP
    )
    for i in range(3):
        n, a = float(std[i]), float(advantage[i])
        bias = float(((mean[i] - old_mean[i]) ** 2).mean()) / (2 * n**2)
        ratio = math.exp((float(new[i] - old[i]) + bias) * n)
        limited = min(max(ratio, 1 - CLIP), 1 + 2 * CLIP)
        assert float(got.loss[i]) == pytest.approx(max(-a * ratio, -a * limited) / -float(dt[i]), rel=1e-12)
        assert float(got.ratio[i]) == pytest.approx(ratio, rel=1e-12)


def test_the_guards_bias_is_exactly_the_mean_of_the_log_ratio() -> None:
    """Over x drawn by the old policy, the log-ratio and the bias cancel: what the guard is for."""
    count = 50_000
    mean = (0.6 * drawn(1, 5, seed=1)).expand(count, 5)
    old_mean, std = torch.zeros(count, 5, dtype=DOUBLE), torch.full((count,), 0.5, dtype=DOUBLE)
    x = old_mean + 0.5 * drawn(count, 5, seed=2)
    new, old = (torch.distributions.Normal(m, 0.5).log_prob(x).mean(dim=1) for m in (mean, old_mean))
    ones = torch.ones(count, dtype=DOUBLE)
    out = guarded_loss(new, old, ones, mean=mean, old_mean=old_mean, std=std, dt=-ones, clip_low=1.0, clip_high=1e9)
    plain, guarded = float((new - old).mean()), float(out.ratio.log().mean())
    assert plain < -0.05
    assert abs(guarded) < 0.05 * abs(plain)


@pytest.mark.parametrize("weighting", ["uniform", "sigma", "sigma_squared", "ghuber"])
@pytest.mark.parametrize("advantage", [1.3, -0.8])
def test_awm_loss_is_the_papers(weighting: Any, advantage: float) -> None:
    v, v_old, target = (drawn(1, 6, seed=i) for i in range(3))
    sigma = torch.tensor([0.6], dtype=DOUBLE)
    errors = [weighted_error(x, target, sigma, weighting=weighting, power=0.25) for x in (v, v_old)]
    out = awm_loss(*errors, torch.tensor([advantage], dtype=DOUBLE), clip_low=0.2, clip_high=0.3)
    plain = [sum((a - b) ** 2 for a, b in zip(x[0].tolist(), target[0].tolist(), strict=True)) / 6 for x in (v, v_old)]
    form: dict[str, Callable[[float], float]] = {
        "uniform": lambda e: e,
        "sigma": lambda e: 0.6 * e,
        "sigma_squared": lambda e: 0.36 * e,
        "ghuber": lambda e: 0.6 * ((e + 1e-10) ** 0.25 - 1e-10**0.25) / 0.25,
    }
    new, old = (form[weighting](e) for e in plain)
    ratio = math.exp(old - new)
    expected = max(-advantage * ratio, -advantage * min(max(ratio, 0.8), 1.3))
    assert float(out.loss) == pytest.approx(expected, rel=1e-12)


def test_a_bad_sample_cannot_pay_without_end() -> None:
    """AWM with A < 0: however far the velocity runs away, the loss ends at the clip, and pulls no further."""
    target = torch.zeros(1, 4, dtype=DOUBLE)
    sigma, advantage = torch.ones(1, dtype=DOUBLE), torch.tensor([-2.0], dtype=DOUBLE)
    for distance in (10.0, 1e3, 1e6):
        v = torch.full((1, 4), distance, dtype=DOUBLE, requires_grad=True)
        old = weighted_error(torch.zeros_like(v), target, sigma, weighting="uniform")
        error = weighted_error(v, target, sigma, weighting="uniform")
        loss = awm_loss(error, old, advantage, clip_low=0.2, clip_high=0.2).loss.sum()
        assert loss.item() == pytest.approx(2.0 * 0.8)
        assert float(torch.autograd.grad(loss, v)[0].abs().max()) == 0.0


def test_dpo_loss_is_the_papers() -> None:
    v_w, ref_w, t_w, v_l, ref_l, t_l = (drawn(2, 3, 2, seed=i) for i in range(6))
    got = dpo_loss(v_w, ref_w, t_w, v_l, ref_l, t_l, beta=3.0)
    for i in range(2):
        e = [float(((a[i] - b[i]) ** 2).mean()) for a, b in ((v_w, t_w), (ref_w, t_w), (v_l, t_l), (ref_l, t_l))]
        margin = -((e[0] - e[1]) - (e[2] - e[3]))
        assert float(got.margin[i]) == pytest.approx(margin, rel=1e-12)
        assert float(got.loss[i]) == pytest.approx(math.log1p(math.exp(-3.0 * margin)), rel=1e-12)


def test_dpo_on_the_reference_is_log_two_and_stays_finite_far_from_it() -> None:
    v, t_w, t_l = (drawn(2, 5, seed=i) for i in range(3))
    assert dpo_loss(v, v, t_w, v, v, t_l, beta=100.0).loss.tolist() == pytest.approx([math.log(2)] * 2)
    far = dpo_loss(v + 1e3, v, t_w, v, v, t_l, beta=2500.0)
    assert torch.isfinite(far.loss).all()
    assert (far.loss > 1e6).all()


def test_matching_error_is_supervised_flow_matching() -> None:
    v, x0, eps = (drawn(2, 3, 4, seed=i) for i in range(3))
    assert torch.equal(velocity_loss(v, x0, eps), matching_error(v, eps - x0))
    assert matching_error(v, eps - x0).tolist() == pytest.approx(
        [float(((v[i] - eps[i] + x0[i]) ** 2).sum()) / 12 for i in range(2)]
    )


class LinearPolicies:
    """Policies whose velocity is W x, one W a role: enough of a model for finite differences, in float64."""

    def __init__(self, weights: dict[str, Tensor]) -> None:
        self.weights = weights

    def velocity(self, tile: Tile, role: Role = "live") -> Latents:
        return {name: x @ self.weights[role].T for name, x in tile.latents.items()}

    def distribution(self, tile: Tile, role: Role = "live") -> dict[str, StepDistribution]:
        return distribution_of(self.velocity(tile, role), tile, make_transition("sde", 0.7))


def tile_of(advantages: Sequence[float]) -> Tile:
    """Two streams; rows at three noise levels."""
    rows, names = len(advantages), STREAMS
    sigma = torch.tensor([0.9, 0.6, 0.3, 0.9], dtype=DOUBLE)[:rows]
    return Tile(
        latents={name: drawn(rows, 5, seed=i) for i, name in enumerate(names)},
        next_latents={name: drawn(rows, 5, seed=i + 2) for i, name in enumerate(names)},
        sigmas=dict.fromkeys(names, sigma),
        next_sigmas=dict.fromkeys(names, sigma - 0.2),
        first_sigmas=dict.fromkeys(names, torch.tensor(0.95, dtype=DOUBLE)),
        old_log_probs=dict.fromkeys(names, torch.full((rows,), -4.0, dtype=DOUBLE)),
        advantages=torch.tensor(advantages, dtype=DOUBLE),
        weight=torch.ones(rows, dtype=DOUBLE),
        conditioning=Conditioning(positive={}, negative=None),
    )


STREAMS = ("visual", "audio")
WIDE: dict[str, Any] = {"clip_low": 0.9999, "clip_high": 1e6}
HALF_SOUND: dict[str, Any] = {"stream_weights": {"audio": 0.5}}
SECTIONS = {
    "flow_grpo": s.FlowGrpoConfig(**WIDE, **HALF_SOUND),
    "flow_grpo_recomputed": s.FlowGrpoConfig(old_log_probs="recompute", **WIDE),
    "flow_grpo_decoupled": s.FlowGrpoConfig(old_log_probs="recompute", importance_cap=2.0, **WIDE, **HALF_SOUND),
    "flow_grpo_kl": s.FlowGrpoConfig(kl_beta=0.3, **WIDE, **HALF_SOUND),
    "flow_grpo_kl_no_dt": s.FlowGrpoConfig(kl_beta=0.3, kl_form="no_dt", **WIDE),
    "grpo_guard": s.GrpoGuardConfig(**WIDE, **HALF_SOUND),
    "grpo_guard_decoupled": s.GrpoGuardConfig(old_log_probs="recompute", importance_cap=1.1, kl_beta=0.3, **WIDE),
    "grpo_guard_kl": s.GrpoGuardConfig(kl_beta=0.3, **WIDE),
    "awm": s.AwmConfig(weighting="ghuber", **WIDE, **HALF_SOUND),
    "awm_kl": s.AwmConfig(kl_beta=0.3, kl_old=0.2, **WIDE),
    "dpo": s.DpoConfig(beta_dpo=0.7, **HALF_SOUND),
    "online_sft": s.OnlineSftConfig(**HALF_SOUND),
    "online_sft_kl": s.OnlineSftConfig(kl_beta=0.3),
}


def loss_and_gradient(section: s.AlgorithmBase, tile: Tile) -> tuple[Callable[[Tensor], Tensor], Tensor, Tensor]:
    """Loss as a function of the live weights, the weights, and autograd's gradient there."""
    algorithm = make_algorithm(section, sampling=s.SamplingConfig(), seed=0)
    start = torch.eye(5, dtype=DOUBLE)
    old, reference = start + 0.1 * drawn(5, 5, seed=10), start + 0.1 * drawn(5, 5, seed=11)

    def loss(live: Tensor) -> Tensor:
        policies = LinearPolicies({"live": live, "old": old, "reference": reference})
        return algorithm.loss(tile, policies).loss.mean()

    live = (start + 0.1 * drawn(5, 5, seed=12)).requires_grad_(True)
    (gradient,) = torch.autograd.grad(loss(live), live)
    return loss, live.detach(), gradient


def difference_along(loss: Callable[[Tensor], Tensor], at: Tensor, direction: Tensor, h: float = 1e-5) -> float:
    return float(loss(at + h * direction) - loss(at - h * direction)) / (2 * h)


def test_samples_of_older_weights_are_weighed_apart_from_the_clip() -> None:
    """min(C, p_old / p_rollout) max(-A rho, -A clip(rho)), rho = p_live / p_old: neither the clip nor rho knows p_rollout."""
    config = s.FlowGrpoConfig(
        old_log_probs="recompute",
        importance_cap=1.4,
        clip_low=0.1,
        clip_high=0.2,
        kl_beta=0.5,
        stream_weights={"audio": 0.5},
    )
    tile = tile_of([1.2, -0.7, 0.4, -1.1])
    start = torch.eye(5, dtype=DOUBLE)
    weights = {role: start + 0.1 * drawn(5, 5, seed=10 + i) for i, role in enumerate(("live", "old", "reference"))}
    policies = LinearPolicies(weights)
    log_probs, kl = {}, [0.0] * 4
    for role in ("live", "old"):
        for name, step in policies.distribution(tile, role).items():
            density = torch.distributions.Normal(step.mean, step.std.expand_as(step.mean))
            log_probs[role, name] = density.log_prob(tile.next_latents[name]).mean(dim=1).tolist()
    recorded = {
        name: [log_probs["old", name][i] - gap for i, gap in enumerate((0.0, 0.2, -0.3, 2.0))] for name in STREAMS
    }
    tile = replace(tile, old_log_probs={name: torch.tensor(values, dtype=DOUBLE) for name, values in recorded.items()})
    for name, live in policies.distribution(tile, "live").items():
        reference = policies.distribution(tile, "reference")[name]
        gap = ((live.mean - reference.mean) ** 2 / (2 * live.std**2)).mean(dim=1).tolist()
        kl = [k + (0.5 if name == "audio" else 1.0) * g for k, g in zip(kl, gap, strict=True)]
    expected = []
    for i, a in enumerate(tile.advantages.tolist()):
        loss = 0.5 * kl[i]
        for name in STREAMS:
            ratio = math.exp(log_probs["live", name][i] - log_probs["old", name][i])
            weight = min(1.4, math.exp(log_probs["old", name][i] - recorded[name][i]))
            limited = min(max(ratio, 0.9), 1.2)
            loss += (0.5 if name == "audio" else 1.0) * weight * max(-a * ratio, -a * limited)
        expected.append(loss)
    losses = make_algorithm(config, sampling=s.SamplingConfig(), seed=0).loss(tile, policies)
    assert losses.loss.tolist() == pytest.approx(expected, rel=1e-9)
    assert losses.means["importance_weight"].tolist() == pytest.approx([1.0, math.exp(0.2), math.exp(-0.3), 1.4])
    assert losses.means["importance_capped"].tolist() == [0.0, 0.0, 0.0, 1.0]


@pytest.mark.parametrize("name", SECTIONS)
def test_gradient_is_that_of_finite_differences(name: str) -> None:
    loss, live, gradient = loss_and_gradient(SECTIONS[name], tile_of([1.2, -0.7, 0.4, -1.1]))
    assert float(gradient.norm()) > 1e-3
    for seed in range(3):
        direction = drawn(5, 5, seed=20 + seed)
        expected = difference_along(loss, live, direction)
        assert float((gradient * direction).sum()) == pytest.approx(expected, rel=1e-6, abs=1e-8)


@pytest.mark.parametrize("name", [*SECTIONS, "nft"])
def test_an_alarm_is_allowed_where_the_loss_reports_its_metric(name: str) -> None:
    """The rule stands in the recipe's classes, the metric in the losses: here they meet."""
    section: Any = SECTIONS.get(name, s.NftConfig())
    algorithm = make_algorithm(section, sampling=s.SamplingConfig(), seed=0)
    weights = {role: torch.eye(5, dtype=DOUBLE) for role in ("live", "old", "reference")}
    losses = algorithm.loss(tile_of([1.2, -0.7, 0.4, -1.1]), LinearPolicies(weights))
    reported = {*losses.means, *losses.maxima}
    alarms = {"clip_fraction": ClipFractionAlarm(), "ratio_max_deviation": RatioDriftAlarm(), "kl": KlAlarm(above=1.0)}
    allowed = {metric for metric, alarm in alarms.items() if why_silent(alarm, section, ()) is None}
    assert allowed == reported & alarms.keys()


KL_ONLY = ["flow_grpo_kl", "flow_grpo_kl_no_dt", "grpo_guard_kl", "awm_kl"]


@pytest.mark.parametrize("name", KL_ONLY)
def test_a_kl_alone_has_a_gradient(name: str) -> None:
    """Advantages of 0 leave the distance to the reference, and nothing else."""
    loss, live, gradient = loss_and_gradient(SECTIONS[name], tile_of([0.0, 0.0, 0.0, 0.0]))
    norm = float(gradient.norm())
    assert norm > 1e-3
    assert difference_along(loss, live, gradient / norm) == pytest.approx(norm, rel=1e-4)


def sample_of(index: int, *, group: int = 0) -> Sample:
    grid = torch.tensor([1.0, 0.75, 0.5, 0.25, 0.0])
    latents = torch.full((1, 2, 3), float(index))  # [K=1, 2, 3]
    trajectory = StreamTrajectory(
        latents=latents,
        latent_step_indices=torch.tensor([4]),
        sigmas=grid,
        timesteps=grid * 1000,
        log_probs=torch.zeros(4),
        sde_step_indices=(),
    )
    return Sample(
        key=SampleKey(rollout=0, group=group, index=index),
        prompt="a",
        seed=index,
        initial_seed=index,
        weight_version=0,
        media=torch.zeros(1, 1, 1, 3, dtype=torch.uint8),
        fps=None,
        streams={"visual": trajectory},
    )


def scored_group(advantages: Sequence[float], mask: Sequence[bool] | None = None, *, micro: int = 2) -> ScoredGroup:
    """Samples whose latent is their index everywhere, in microgroups of `micro`; text rows say the index too."""
    samples = [sample_of(index) for index in range(len(advantages))]
    microgroups = tuple(
        Microgroup(
            samples=tuple(samples[i : i + micro]),
            conditioning=Conditioning(
                positive={"text": torch.arange(i, i + micro).float().view(-1, 1, 1)}, negative=None
            ),
            echo={},
        )
        for i in range(0, len(samples), micro)
    )
    scores = tuple(Scores(by_reward={"r": tuple(advantages[i : i + micro])}) for i in range(0, len(samples), micro))
    group = Group(rollout=0, index=0, prompt="a", microgroups=microgroups, scores=scores)
    return ScoredGroup(group=group, advantages=tuple(advantages), mask=tuple(mask or [True] * len(samples)))


def blocks_of(section: s.AlgorithmBase, group: ScoredGroup) -> list[PairBlock]:
    return make_algorithm(section, sampling=s.SamplingConfig(), seed=5).blocks(group)


def indices(block: PairBlock) -> list[int]:
    """Whose samples a block holds, by latents and by text."""
    by_latent = [int(x0.flatten()[0]) for x0 in block.next_latents["visual"][0]]
    assert by_latent == [int(v) for v in block.conditioning.positive["text"].flatten()]
    return by_latent


def test_a_preference_is_best_and_worst_on_shared_noise() -> None:
    (block,) = blocks_of(s.DpoConfig(timestep_fraction=1.0), scored_group([0.1, 1.4, -0.3, -1.2]))
    assert indices(block) == [1, 3]
    t = block.sigmas["visual"]
    assert torch.equal(t[:, 0], t[:, 1])
    assert sorted(t[:, 0].tolist()) == [0.25, 0.5, 0.75, 1.0]
    rows = t.view(4, 2, 1, 1)
    eps = (block.latents["visual"] - (1 - rows) * block.next_latents["visual"]) / rows
    torch.testing.assert_close(eps[:, 0], eps[:, 1])
    assert float(eps.std()) > 0.5


def test_ties_and_masked_samples_make_no_preference() -> None:
    section = s.DpoConfig()
    assert blocks_of(section, scored_group([0.0, 0.0, 0.0, 0.0])) == []
    assert blocks_of(section, scored_group([2.0, 0.0, 0.0, 0.0], [True, False, False, False])) == []
    (block,) = blocks_of(section, scored_group([9.0, 1.0, -1.0, -9.0], [False, True, True, False]))
    assert indices(block) == [1, 2]


def test_online_sft_keeps_the_best() -> None:
    group = scored_group([0.9, -1.0, 1.1, -0.9, 0.2, -0.3])

    def kept(**keys: Any) -> list[list[int]]:
        return [indices(block) for block in blocks_of(s.OnlineSftConfig(**keys), group)]

    assert kept(keep_fraction=0.5) == [[0], [2], [4]]
    assert kept(keep_fraction=0.17) == [[0], [2]]  # 1.02 of six, rounded up
    assert kept(keep_fraction=1.0) == [[0], [2], [4]]
    assert kept(keep_fraction=1.0, min_advantage=0.5) == [[0], [2]]
    assert kept(keep_fraction=1.0, min_advantage=-9.0) == [[0], [1], [2], [3], [4], [5]]
    masked = replace(group, mask=(False, True, False, True, True, True))
    assert [indices(block) for block in blocks_of(s.OnlineSftConfig(keep_fraction=0.5), masked)] == [[4]]


@pytest.mark.parametrize("section", [s.DpoConfig(), s.OnlineSftConfig(keep_fraction=0.5), s.AwmConfig(), s.NftConfig()])
def test_pairs_follow_the_rewards(section: s.AlgorithmBase) -> None:
    """Advantages in another order: the same samples' latents in the places that the advantages went to."""
    advantages = [0.5, -0.2, 1.3, -1.6]
    order = [2, 0, 3, 1]
    permuted = [advantages[i] for i in order]

    def by_sample(values: Sequence[float]) -> dict[float, set[int]]:
        found: dict[float, set[int]] = {}
        for block in blocks_of(section, scored_group(values)):
            for index, advantage in zip(indices(block), block.advantages.tolist(), strict=True):
                found.setdefault(round(advantage, 6), set()).add(index)
        return found

    before, after = by_sample(advantages), by_sample(permuted)
    assert before.keys() == after.keys()
    assert {a: {order[i] for i in places} for a, places in after.items()} == before


def test_targets_of_noised_pairs_are_eps_minus_x0() -> None:
    (first, _) = blocks_of(s.AwmConfig(timestep_fraction=1.0), scored_group([1.0, -1.0, 0.5, -0.5]))
    t = first.sigmas["visual"].flatten()
    x_t, x0 = first.latents["visual"].flatten(0, 1), first.next_latents["visual"].flatten(0, 1)
    tile = replace(tile_of([0.0]), latents={"visual": x_t}, next_latents={"visual": x0}, sigmas={"visual": t})
    rows = t.view(-1, 1, 1)
    eps = (x_t - (1 - rows) * x0) / rows
    torch.testing.assert_close(tile.targets()["visual"], eps - x0, rtol=1e-5, atol=1e-5)
