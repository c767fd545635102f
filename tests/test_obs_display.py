"""What a person sees: the live panel, plain lines, and the closing summary."""

import io
from pathlib import Path

from rich.console import Console

from verst.obs.progress import (
    LineProgress,
    LiveProgress,
    ProgressState,
    QuietProgress,
    duration,
    make_progress,
    panel,
    sparkline,
)
from verst.obs.summary import RunSummary, print_summary

METRICS = {
    "reward/train_mean": 0.5,
    "train/loss": 1e-5,
    "perf/iteration_s": 2.0,
    "perf/generate_s": 1.0,
    "perf/reward_s": 0.25,
    "perf/train_s": 0.5,
    "perf/sync_s": 0.125,
}


def console(*, terminal):
    return Console(file=io.StringIO(), force_terminal=terminal, width=100, color_system=None)


def text(screen):
    return screen.file.getvalue()


def test_the_display_that_fits():
    assert isinstance(make_progress(name="r", total=1, quiet=True), QuietProgress)
    assert isinstance(make_progress(name="r", total=1, console=console(terminal=False)), LineProgress)
    live = make_progress(name="r", total=1, console=console(terminal=True))
    assert isinstance(live, LiveProgress)
    live.close()


def test_stages_of_an_asynchronous_run_are_those_that_add_up():
    state = ProgressState(name="r", total=2)
    state.add(1, METRICS | {"perf/wait_for_rollout_s": 1.25, "perf/wait_for_training_s": 0.0})
    assert state.stages == {"wait for rollout": 1.25, "train": 0.5, "sync": 0.125}


def test_lines_say_reward_heldout_split_and_time_left():
    screen = console(terminal=False)
    progress = make_progress(name="glyphs", total=101, console=screen)
    progress.status("starting [1] engine")
    progress.update(0, {"reward/heldout": 0.4})
    progress.update(1, METRICS)
    progress.update(2, METRICS | {"reward/heldout": 0.65, "perf/iteration_s": 4.0})
    progress.close()
    supervised = make_progress(name="sft", total=2, console=(lines := console(terminal=False)))
    supervised.update(1, {"train/loss": 1.5, "perf/iteration_s": 2.0})
    supervised.close()
    assert text(lines).strip() == "iteration 1/2  loss 1.5  2.00 s  2 s left"
    status, start, first, second = text(screen).splitlines()
    assert status == "starting [1] engine"
    assert start == "iteration 0/101  held-out 0.400"
    assert first == (
        "iteration 1/101  reward 0.500  loss 1e-05  2.00 s = generate 1.00 + reward 0.25 + train 0.50 + sync 0.12"
        "  3 min 20 s left"
    )
    assert "held-out 0.400 -> 0.650 (+0.250)" in second
    assert "4 min 57 s left" in second


def test_a_notice_is_seen_and_stays():
    for terminal in (False, True):
        progress = make_progress(name="r", total=3, console=(screen := console(terminal=terminal)))
        progress.notice("iteration 1: alarm kl (log): policy/kl is 2, above [1]")
        progress.status("saving")
        progress.close()
        assert text(screen).count("iteration 1: alarm kl (log): policy/kl is 2, above [1]") == 1


def test_a_resumed_run_counts_from_where_it_was():
    screen = console(terminal=False)
    progress = make_progress(name="glyphs", total=100, console=screen)
    progress.replay(0, {"reward/heldout": 0.4})
    progress.replay(90, METRICS)
    assert text(screen) == ""
    progress.update(91, METRICS | {"reward/heldout": 0.5})
    assert "18 s left" in text(screen)
    assert "0.400 -> 0.500" in text(screen)


def test_the_panel_shows_the_same():
    state = ProgressState(name="glyphs", total=100)
    state.add(0, {"reward/heldout": 0.4})
    for i in range(1, 11):
        state.add(i, METRICS | {"reward/train_mean": i / 10})
    screen = console(terminal=True)
    screen.print(panel(state, "saving [step 10]"))
    shown = text(screen)
    for part in (
        "glyphs",
        "iteration 10 of 100",
        "1.000, mean of 7: 0.700",
        "0.400",
        "generate 1.00",
        "3 min 00 s",
        "saving [step 10]",
    ):
        assert part in shown
    screen.print(panel(ProgressState(name="empty", total=5), ""))


def test_the_live_display_leaves_its_last_state():
    screen = console(terminal=True)
    progress = make_progress(name="glyphs", total=2, console=screen)
    progress.status("loading")
    progress.update(1, METRICS)
    progress.update(2, METRICS | {"reward/heldout": 0.75})
    progress.close()
    assert "iteration 2 of 2" in text(screen)
    assert "0.750" in text(screen)


def test_small_pieces():
    assert sparkline([0.0, 0.5, 1.0], 40) == "▁▅█"
    assert sparkline([2.0, 2.0, 2.0], 2) == "▁▁"
    assert [duration(s) for s in (0.4, 12, 185, 3725)] == ["0 s", "12 s", "3 min 05 s", "1 h 02 min"]


def test_summary_keeps_paths_whole_and_says_before_and_after():
    summary = RunSummary(
        name="glyphs",
        iterations=100,
        seconds=185.0,
        heldout_before=0.42,
        heldout_after=0.71,
        paths={"curve": Path("runs") / ("a" * 120) / "curve.png"},
        notes=("3 samples were masked",),
    )
    plain, terminal = console(terminal=False), console(terminal=True)
    print_summary(summary, plain)
    assert text(plain).splitlines() == [
        "held-out reward: 0.420 -> 0.710 (+0.290)",
        "iterations: 100 in 3 min 05 s",
        "note: 3 samples were masked",
        f"curve: runs/{'a' * 120}/curve.png",
    ]
    print_summary(summary, terminal)
    assert "0.420 -> 0.710 (+0.290)" in text(terminal)
