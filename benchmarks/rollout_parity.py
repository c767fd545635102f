"""The rollout controller against a plain loop and against SGLang-Diffusion's own controller, bit for bit.

python benchmarks/rollout_parity.py [--wheel FOLDER] [--out FILE]

Prints one line for each case: mode x plain or filtered steps x 1 or 2 sequence-parallel shards x dtype of the model
output x shapes. In every case two samples are rolled out twice: once with the log-prob of the stored latent, once with
that of the drawn noise, which is the one that SGLang has. Every returned tensor of every stream is compared with
`torch.equal`: with `reference`, a loop over whole tensors that knows neither shards nor streams nor schedulers, and
where the case exists there with the controller of the sglang wheel (`make test-sglang` unpacks it into build/sglang).
Writes the counts to benchmarks/results/rollout_parity.json and exits 1 when a tensor differs.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import platform
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import diffusers
import torch
from torch import Tensor
from torch.distributions import Normal

from verst.flow.controller import LogProbOf, RolloutOptions, make_transition
from verst.flow.denoise import denoise
from verst.flow.hooks import RolloutResult, Stream, prepare_rollout
from verst.flow.noise import SampleNoise, derive_seed
from verst.flow.scheduler import FlowMatchEulerDiscreteScheduler
from verst.flow.shards import Shards, shard_sizes
from verst.types import Latents

ROOT = Path(__file__).parents[1]
WHEEL = ROOT / "build" / "sglang" / "wheel"
ETA = {"sde": 0.7, "cps": 0.8, "dance": 0.3, "ode": 0.0}
IN_SGLANG = ("sde", "cps", "ode")
NUM_STEPS = 5
FILTER = {"sde_steps": (1, 3), "kept": (1, 2, 3, 4)}
SHAPES: dict[str, dict[str, tuple[tuple[int, ...], int]]] = {
    # stream -> (latent shape of one sample, dimension of [B, ...] that is cut); no cut dimension is even.
    "image": {"visual": ((4, 7, 6), 2)},
    "video": {"visual": ((4, 5, 4, 6), 2)},
    "audio-video": {"visual": ((4, 3, 4, 6), 2), "audio": ((9, 8), 1)},
}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
Tensors = dict[str, Tensor]
"""name -> what one rollout of one stream returned."""


@dataclass(frozen=True, kw_only=True)
class Case:
    mode: str
    filtered: bool
    num_shards: int
    dtype: str
    shapes: str
    seeds: tuple[int, ...] = (41, 977)
    shift: float = 3.0
    eta: float | None = None
    """None = the usual one of the mode."""
    all_no_const: bool = False

    @property
    def noise_level(self) -> float:
        return ETA[self.mode] if self.eta is None else self.eta

    @property
    def sde_steps(self) -> tuple[int, ...]:
        if self.mode == "ode":
            return ()
        return FILTER["sde_steps"] if self.filtered else tuple(range(NUM_STEPS))

    @property
    def kept(self) -> tuple[int, ...] | None:
        return FILTER["kept"] if self.filtered else None

    @property
    def no_const(self) -> bool:
        """The last cps step has no noise and so no full log-prob."""
        return self.all_no_const or (self.mode == "cps" and not self.filtered)


def all_cases() -> list[Case]:
    axes = itertools.product(ETA, (False, True), (1, 2), ("fp32", "bf16"), SHAPES)
    return [Case(mode=m, filtered=f, num_shards=n, dtype=d, shapes=s) for m, f, n, d, s in axes]


def patterns(case: Case, stream: str) -> Tensor:
    """[T, B, ...]: what the model of these cases answers, besides a part of what it is fed."""
    generator = torch.Generator().manual_seed(derive_seed("pattern", stream))
    return torch.randn((NUM_STEPS, len(case.seeds), *SHAPES[case.shapes][stream][0]), generator=generator)


def initial_latents(case: Case) -> Latents:
    noise = SampleNoise(case.seeds)
    return {name: noise.initial(shape) for name, (shape, _) in SHAPES[case.shapes].items()}


def reference(case: Case, stream: str, log_prob_of: LogProbOf) -> Tensors:
    """One stream by a loop over whole tensors, written from the formulas."""
    streams = SHAPES[case.shapes]
    first = next(iter(streams))
    rows = []
    for row, seed in enumerate(case.seeds):
        generator = torch.Generator().manual_seed(seed)
        drawn = {name: torch.randn((1, *s), generator=generator) for name, (s, _) in streams.items()}
        if stream != first:
            generator = torch.Generator().manual_seed(derive_seed(seed, "stream", stream))
        rows.append(_reference_row(case, drawn[stream], patterns(case, stream)[:, row], generator, log_prob_of))
    whole = {name: torch.cat([one[name] for one in rows]) for name in rows[0] if name not in ("sigmas", "timesteps")}
    return {**whole, "sigmas": rows[0]["sigmas"], "timesteps": rows[0]["timesteps"]}


def _reference_row(
    case: Case, x: Tensor, pattern: Tensor, generator: torch.Generator, log_prob_of: LogProbOf
) -> Tensors:
    sigmas = _grid(case)
    latents, log_probs, debug = [x], [], []
    for i in range(NUM_STEPS):
        s, s_next = sigmas[i], sigmas[i + 1]
        v = (pattern[i : i + 1] - 0.25 * x).to(DTYPES[case.dtype])
        if i not in case.sde_steps:
            # What a serving step computes, in the model output's own dtype.
            x = (x + (s_next - s) * v).to(v.dtype).float()
            log_probs.append(torch.zeros(1))
        else:
            mean, std = _reference_step(case, x, v.float(), s, s_next, sigmas[1])
            noise = torch.randn(x.shape, generator=generator)
            x = (mean + noise * std).to(v.dtype).float()
            deviation = noise * std if log_prob_of == "noise" else x - mean
            value = -(deviation**2)
            if not case.no_const:
                value = value / (2 * std**2) - torch.log(std) - math.log(math.sqrt(2 * math.pi))
            log_probs.append(value.flatten(1).mean(dim=1))
            debug.append((noise, mean, std.reshape(1, 1), v.float()))
        latents.append(x)
    kept = range(NUM_STEPS + 1) if case.kept is None else case.kept
    out = {
        "latents": torch.stack([latents[i] for i in kept], dim=1),
        "log_probs": torch.stack(log_probs, dim=1),
        "sigmas": sigmas,
        "timesteps": torch.cat([sigmas[:-1] * 1000, torch.zeros(1)]),
        "final": x,
    }
    for name, values in zip(("noise", "mean", "std", "model_output"), zip(*debug, strict=True), strict=False):
        out[name] = torch.stack(values, dim=1)
    return out


def _reference_step(
    case: Case, x: Tensor, v: Tensor, s: Tensor, s_next: Tensor, first: Tensor
) -> tuple[Tensor, Tensor]:
    eta, dt = case.noise_level, s_next - s
    if case.mode == "cps":
        std = s_next * math.sin(eta * math.pi / 2)
        clean, noisy = x - s * v, x + (1 - s) * v
        return clean * (1 - s_next) + noisy * torch.sqrt(s_next**2 - std**2), std
    g = torch.tensor(eta) if case.mode == "dance" else eta * torch.sqrt(s / (1 - (first if s == 1 else s)))
    return x * (1 + g**2 / (2 * s) * dt) + v * (1 + g**2 * (1 - s) / (2 * s)) * dt, g * torch.sqrt(-1 * dt)


def _grid(case: Case) -> Tensor:
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler(shift=case.shift)
    scheduler.set_timesteps(NUM_STEPS)
    return scheduler.sigmas


class ThreadShards:
    """Ranks that are threads of this process: each puts its part down and takes everybody's up."""

    def __init__(self, world_size: int) -> None:
        self._parts: list[Tensor] = [torch.empty(0)] * world_size
        self._barrier = threading.Barrier(world_size, timeout=30)

    def shards(self, rank: int, *, size: int, dim: int) -> Shards:
        """The closures of one stream on one rank."""
        sizes = shard_sizes(size, len(self._parts))

        def gather(local: Tensor) -> Tensor:
            self._parts[rank] = local
            self._barrier.wait()
            whole = torch.cat(self._parts, dim=dim)
            self._barrier.wait()
            return whole

        return Shards(lambda full: full.narrow(dim, sum(sizes[:rank]), sizes[rank]), gather)


def on_ranks(world_size: int, work: Callable[[int], Any]) -> list[Any]:
    """`work(rank)` on one thread a rank; their results, by rank."""
    results: list[Any] = [None] * world_size

    def target(rank: int) -> None:
        results[rank] = work(rank)

    threads = [threading.Thread(target=target, args=(rank,)) for rank in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def rolled_out(case: Case, log_prob_of: LogProbOf) -> list[dict[str, Tensors]]:
    """What verst returns on each rank: stream -> tensors."""
    meeting = ThreadShards(case.num_shards)
    options = RolloutOptions(
        transition=make_transition(case.mode, case.noise_level),
        sde_step_indices=case.sde_steps,
        return_step_indices=case.kept,
        log_prob_of=log_prob_of,
        log_prob_no_const=case.no_const,
        debug=True,
    )
    return on_ranks(case.num_shards, lambda rank: _one_rank(case, options, meeting, rank))


def _one_rank(case: Case, options: RolloutOptions, meeting: ThreadShards, rank: int) -> dict[str, Tensors]:
    noise = SampleNoise(case.seeds)
    streams, latents, answers, cuts, schedulers = [], {}, {}, {}, {}
    for name, (shape, dim) in SHAPES[case.shapes].items():
        schedulers[name] = FlowMatchEulerDiscreteScheduler(shift=case.shift)
        schedulers[name].set_timesteps(NUM_STEPS)
        full = noise.initial(shape)
        cut = meeting.shards(rank, size=shape[dim - 1], dim=dim) if case.num_shards > 1 else None
        streams.append(
            Stream(
                name=name,
                sigmas=schedulers[name].sigmas,
                latent_shape=tuple(full.shape),
                noise=noise.steps(name, first=not streams),
                shards=cut,
            )
        )
        cuts[name] = cut.shard if cut else lambda full: full
        latents[name] = cuts[name](full)
        answers[name] = patterns(case, name)
    steps = itertools.count()

    def velocity(x: Latents, sigmas: dict[str, Tensor]) -> Latents:
        i = next(steps)
        return {n: (cuts[n](answers[n][i]) - 0.25 * x[n].float()).to(DTYPES[case.dtype]) for n in x}

    rollout = prepare_rollout(options, streams)
    final = denoise(velocity, latents, schedulers, transitions=rollout.transitions)
    result = rollout.finalize(final, {name: s.timesteps for name, s in schedulers.items()})
    whole = {name: next(s for s in streams if s.name == name) for name in final}
    return {
        name: _returned(case, result, name, x.float() if (s := whole[name].shards) is None else s.gather(x.float()))
        for name, x in final.items()
    }


def _returned(case: Case, result: RolloutResult, stream: str, final: Tensor) -> Tensors:
    paths = result.trajectories[stream]
    out = {
        "latents": torch.stack([path.latents for path in paths]),
        "log_probs": torch.stack([path.log_probs for path in paths]),
        "sigmas": paths[0].sigmas,
        "timesteps": paths[0].timesteps,
        "final": final,
    }
    kept = tuple(range(NUM_STEPS + 1)) if case.kept is None else case.kept
    assert all(tuple(path.latent_step_indices.tolist()) == kept for path in paths)
    for name, values in result.debug[stream].items():
        stacked = torch.stack([values[i] for i in case.sde_steps], dim=1)
        out[name] = stacked.flatten(2) if name == "std" else stacked
    return out


def sglang_runs(case: Case) -> list[dict[str, Any]]:
    """The same case as runs of SGLang's controller: one for each stream, sample and rank (it serves one sample best)."""
    streams, runs = SHAPES[case.shapes], []
    initial = initial_latents(case)
    for position, (name, (shape, dim)) in enumerate(streams.items()):
        before = [(1, *s) for s, _ in streams.values()] if position == 0 else []
        sizes = shard_sizes(shape[dim - 1], case.num_shards)
        for (row, seed), rank in itertools.product(enumerate(case.seeds), range(case.num_shards)):
            runs.append(
                {
                    "mode": case.mode,
                    "eta": case.noise_level,
                    "no_const": case.no_const or case.mode == "ode",
                    "sde_steps": list(case.sde_steps) if case.filtered else None,
                    "kept": None if case.kept is None else list(case.kept),
                    "seed": seed if position == 0 else derive_seed(seed, "stream", name),
                    "drawn_before": before,
                    "initial": initial[name][row : row + 1],
                    "patterns": patterns(case, name)[:, row],
                    "shard": (dim, sum(sizes[:rank]), sizes[rank]),
                    "num_steps": NUM_STEPS,
                    "shift": case.shift,
                    "dtype": DTYPES[case.dtype],
                }
            )
    return runs


def sglang_answers(cases: Sequence[Case], wheel: Path) -> dict[Case, dict[str, Tensors]]:
    """case -> stream -> tensors, from one subprocess."""
    runs = {case: sglang_runs(case) for case in cases if case.mode in IN_SGLANG}
    with tempfile.TemporaryDirectory() as folder:
        asked, answered = Path(folder) / "runs.pt", Path(folder) / "out.pt"
        torch.save([run for many in runs.values() for run in many], asked)
        script = Path(__file__).with_name("sglang_controller.py")
        subprocess.run([sys.executable, script, wheel, asked, answered], check=True)
        flat = iter(torch.load(answered))
    return {case: _joined(case, [next(flat) for _ in many]) for case, many in runs.items()}


def _joined(case: Case, answers: list[Tensors]) -> dict[str, Tensors]:
    """Ranks along the cut dimension, samples along the batch, debug rows of the stochastic steps (SGLang has all)."""
    out, parts = {}, iter(answers)
    for name, (_, dim) in SHAPES[case.shapes].items():
        rows = []
        for _ in case.seeds:
            ranks = [next(parts) for _ in range(case.num_shards)]
            row = {key: ranks[0][key] for key in ("log_probs", "std", "sigmas", "kept_timesteps")}
            assert all(torch.equal(rank["log_probs"], row["log_probs"]) for rank in ranks)
            row |= {k: torch.cat([r[k] for r in ranks], dim=dim) for k in ("final",)}
            stacked = ("latents", "noise", "mean", "model_output")
            row |= {k: torch.cat([r[k] for r in ranks], dim=dim + 1) for k in stacked}
            steps = list(case.sde_steps)
            row |= {k: row[k][:, steps].float() for k in ("noise", "mean", "std", "model_output")}
            rows.append(row)
        shared = ("sigmas", "kept_timesteps")
        out[name] = {k: torch.cat([row[k] for row in rows]) for k in rows[0] if k not in shared}
        out[name] |= {k: rows[0][k] for k in shared}
        if not case.sde_steps:
            for key in ("noise", "mean", "std", "model_output"):
                del out[name][key]
    return out


def equal_counts(case: Case, ours: dict[str, Tensors], theirs: dict[str, Tensors]) -> tuple[int, int]:
    """(bitwise equal, compared) tensors of all streams; a name that only one side has counts as different."""
    same, total = 0, 0
    for name in ours.keys() | theirs.keys():
        mine, other = dict(ours.get(name, {})), dict(theirs.get(name, {}))
        if "kept_timesteps" in other:
            kept = list(range(NUM_STEPS + 1) if case.kept is None else case.kept)
            mine["kept_timesteps"] = mine.pop("timesteps")[kept]
        for key in mine.keys() | other.keys():
            total += 1
            same += key in mine and key in other and torch.equal(mine[key], other[key])
    return same, total


def float64_error(case: Case, tensors: dict[str, Tensors]) -> float:
    """Largest |log-prob - exact| / max(1, |exact|) of the stochastic steps' full log-probs.

    exact: torch's Normal in float64, with a mean that is worked out in float64 from the stored latents and the model
    outputs by the papers' score form, at the next latent as stored.
    """
    kept = list(range(NUM_STEPS + 1) if case.kept is None else case.kept)
    worst = 0.0
    for one in tensors.values():
        for column, step in enumerate(case.sde_steps):
            x, x_next = (one["latents"][:, kept.index(i)].double() for i in (step, step + 1))
            mean, std = _float64_step(case, x, one["model_output"][:, column].double(), one["sigmas"].double(), step)
            exact = Normal(mean, std).log_prob(x_next).flatten(1).mean(dim=1)
            error = (one["log_probs"][:, step].double() - exact).abs() / exact.abs().clamp(min=1)
            worst = max(worst, float(error.max()))
    return worst


def _float64_step(case: Case, x: Tensor, v: Tensor, sigmas: Tensor, step: int) -> tuple[Tensor, float]:
    s, s_next, eta = float(sigmas[step]), float(sigmas[step + 1]), case.noise_level
    if case.mode == "cps":
        angle = eta * math.pi / 2
        return (1 - s_next) * (x - s * v) + s_next * math.cos(angle) * (x + (1 - s) * v), s_next * math.sin(angle)
    g = eta if case.mode == "dance" else eta * math.sqrt(s / (1 - (float(sigmas[1]) if s == 1 else s)))
    score = -(x + (1 - s) * v) / s
    return x + (v - g**2 / 2 * score) * (s_next - s), g * math.sqrt(s - s_next)


def measure(case: Case, sglang: dict[str, Tensors] | None) -> dict[str, Any]:
    """One line of the table."""
    line: dict[str, Any] = {
        "mode": case.mode,
        "steps": "filtered" if case.filtered else "plain",
        "shards": case.num_shards,
        "output": case.dtype,
        "shapes": case.shapes,
        "sglang": None if sglang is None else (0, 0),
    }
    for log_prob_of in ("stored", "noise"):
        ranks = rolled_out(case, log_prob_of)
        expected = {name: reference(case, name, log_prob_of) for name in SHAPES[case.shapes]}
        counts = [equal_counts(case, rank, expected) for rank in ranks]
        line[log_prob_of] = (sum(a for a, _ in counts), sum(b for _, b in counts))
        if log_prob_of == "stored" and case.sde_steps and not case.no_const:
            line["float64_error"] = float64_error(case, ranks[0])
        if log_prob_of == "noise" and sglang is not None:
            counts = [equal_counts(case, rank, sglang) for rank in ranks]
            line["sglang"] = (sum(a for a, _ in counts), sum(b for _, b in counts))
    return line


def is_equal(line: dict[str, Any]) -> bool:
    """Every tensor is, and the log-probs are float64's within 1e-6."""
    return line.get("float64_error", 0.0) <= 1e-6 and all(
        same == total > 0 for same, total in (line["stored"], line["noise"], line["sglang"] or (1, 1))
    )


HEADER = "mode   steps     shards  output  shapes       stored=loop  noise=loop  noise=SGLang  float64 error"


def row(line: dict[str, Any]) -> str:
    counts = {key: "-" if line[key] is None else "{}/{}".format(*line[key]) for key in ("stored", "noise", "sglang")}
    error = f"{line['float64_error']:.1e}" if "float64_error" in line else "-"
    return (
        f"{line['mode']:5s}  {line['steps']:8s}  {line['shards']:6d}  {line['output']:6s}  {line['shapes']:11s}  "
        f"{counts['stored']:>11s}  {counts['noise']:>10s}  {counts['sglang']:>12s}  {error:>13s}"
    )


def summary(lines: Sequence[dict[str, Any]], *, sglang: str | None) -> dict[str, Any]:
    """What is written beside the cases."""
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "machine": f"{platform.system()} {platform.machine()}, CPU",
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "diffusers": diffusers.__version__,
            "sglang": sglang,
        },
        "num_cases": len(lines),
        "num_equal_cases": sum(map(is_equal, lines)),
        "tensors": {
            key: dict(
                zip(
                    ("equal", "compared"),
                    map(sum, zip(*(ln[key] for ln in lines if ln[key]), strict=True)),
                    strict=False,
                )
            )
            for key in ("stored", "noise", "sglang")
        },
        "largest_float64_error": max(line.get("float64_error", 0.0) for line in lines),
    }


def write(out: Path, result: dict[str, Any], lines: Sequence[dict[str, Any]]) -> None:
    """JSON with one case a line."""
    head = json.dumps(result, indent=1).removesuffix("\n}")
    cases = ",\n".join("  " + json.dumps(line) for line in lines)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(f'{head},\n "cases": [\n{cases}\n ]\n}}\n')


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--wheel", type=Path, default=WHEEL, help="the unpacked sglang wheel")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "rollout_parity.json")
    options = parser.parse_args()
    torch.set_num_threads(1)
    cases = all_cases()
    found = sorted(options.wheel.glob("sglang-*.dist-info"))
    version = found[0].name.removeprefix("sglang-").removesuffix(".dist-info") if found else None
    answers = sglang_answers(cases, options.wheel) if found else {}
    if not found:
        print("no SGLang wheel is unpacked, so its column stays empty; `make test-sglang` unpacks one")
    print(HEADER)
    lines = []
    for case in cases:
        lines.append(measure(case, answers.get(case)))
        print(row(lines[-1]), flush=True)
    result = summary(lines, sglang=version)
    write(options.out, result, lines)
    print(f"{result['num_equal_cases']} of {len(cases)} cases are equal in every tensor: {result['tensors']}")
    return int(result["num_equal_cases"] != len(cases))


if __name__ == "__main__":
    sys.exit(main())
