"""`verst trace` and `verst triage`: where the time of a run went."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from verst.cli.options import print_json, waiting

if TYPE_CHECKING:
    from verst.obs.triage import Triage, Use

_PHASES = {
    "wait": "waiting for the rollout",
    "drain": "waiting for engines to finish",
    "train": "training",
    "sync": "weights to the engines",
    "evaluate": "evaluations",
    "checkpoint": "checkpoints",
    "other": "everything else",
}


def trace(run: Path, out: Path | None, *, as_json: bool, quiet: bool) -> None:
    with waiting(quiet=quiet or as_json) as tell:
        tell(f"reading {run}")
        from verst.loops.timing import trace_run

        path, spans = trace_run(run, out)
    if as_json:
        print_json({"path": path, "spans": spans})
        return
    print(f"{path}: {spans} spans; open it at https://ui.perfetto.dev or in chrome://tracing")


def triage(run: Path, *, as_json: bool, quiet: bool) -> None:
    with waiting(quiet=quiet or as_json) as tell:
        tell(f"reading {run}")
        from verst.loops.timing import triage_run

        result = triage_run(run)
    if as_json:
        print_json(result)
        return
    print(f"{run}: {result.iterations} iterations of {_s(result.iteration_s)} on average were looked at")
    for line in in_words(result):
        print(line)


def in_words(found: Triage) -> Iterator[str]:
    """What triage says, line by line."""
    yield "\nWhere an iteration goes"
    for name, seconds in sorted(found.phases.items(), key=lambda item: -item[1]):
        if seconds >= 0.001 * found.iteration_s:
            yield f"  {_PHASES.get(name, name):<30} {_s(seconds):>9} {seconds / found.iteration_s:>5.0%}"
    yield "\nWho works"
    for use in found.uses:
        yield f"  {_who(use):<30} {use.utilisation:>5.0%} of the time, idle {1 - use.utilisation:.0%}"
    if found.path:
        parts = [f"{name} {_s(seconds)}" for name, seconds in sorted(found.path.items(), key=lambda item: -item[1])]
        yield f"\nThe last microgroup of a rollout ({_s(found.rollout_s)}): {', '.join(parts)}"
    yield f"\n{_bound(found)}"
    if not found.findings:
        yield "No single knob that verst knows of would save 4% of an iteration or more."
        return
    yield "What would help, each by itself"
    for number, finding in enumerate(found.findings, start=1):
        more = "; needs more devices" if finding.needs_devices else ""
        yield f"  {number}. {finding.knob}: {finding.change} saves {_s(finding.gain_s)} an iteration ({finding.gain:.0%}){more}"
        yield f"     {finding.why}"
    yield (
        f"Predicted by a simulation of this run, in which rollout, training and sync take {_s(found.modelled_s)} an "
        f"iteration; in the run they took {_s(sum(found.phases[name] for name in ('wait', 'train', 'drain', 'sync')))}."
    )


def _bound(found: Triage) -> str:
    use = next((use for use in found.uses if use.name == found.bottleneck), None)
    if use is None:
        return f"The run is bound by {_PHASES.get(found.bottleneck, found.bottleneck)}."
    if use.name == "trainer":
        return f"The run is bound by training: {_s(use.busy_s)} of an iteration of {_s(found.iteration_s)}."
    work = (
        f"{_who(use)} would need {_s(use.busy_s)} for a rollout if nothing held them up; it takes {_s(found.rollout_s)}"
    )
    return f"The run is bound by its rollouts, and these by {use.name}: {work}."


def _who(use: Use) -> str:
    _, of_reward, reward = use.name.partition("reward/")
    name = f"{reward} worker" if of_reward else use.name
    return f"{use.number} {name}{'' if use.number == 1 else 's'}"


def _s(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds < 100 else f"{seconds:.0f} s"
