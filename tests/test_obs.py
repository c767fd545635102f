"""What a run leaves behind: metrics, events, TensorBoard files and pictures, read back by other means."""

import ast
import json
import math
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

from verst.errors import CheckpointError, InvariantError
from verst.obs.curve import moving_mean, save_curve
from verst.obs.events import EventLog, now, read_events
from verst.obs.images import before_after, grid, save_png
from verst.obs.json_lines import keep_rows
from verst.obs.metrics import MetricsLog, read_metrics, series
from verst.obs.spans import Spans
from verst.obs.stamps import Stamps
from verst.obs.tensorboard import TensorBoardLog

ROOT = Path(__file__).parents[1]


def test_metrics_come_back_exactly(tmp_path):
    values = {"a": 0.1 + 0.2, "b": 3, "c": 1e-300, "d": float(np.float32(0.1)), "e": np.float64(1 / 3)}
    with MetricsLog(tmp_path / "run" / "metrics.jsonl") as log:
        log.append(0, values)
        log.append(1, {"a": np.float32(0.5)})
        assert read_metrics(tmp_path / "run" / "metrics.jsonl")[0] == {"iteration": 0, **values}  # flushed, still open
    assert read_metrics(tmp_path / "run" / "metrics.jsonl")[1] == {"iteration": 1, "a": 0.5}


def test_non_finite_metrics_are_null_and_named(tmp_path):
    path = tmp_path / "metrics.jsonl"
    with MetricsLog(path) as log:
        log.append(1, {"train/loss": math.nan, "reward": -math.inf, "ok": 1.0})
    row = json.loads(path.read_text(), parse_constant=lambda word: pytest.fail(f"{word} is no JSON"))
    assert row == {
        "iteration": 1,
        "train/loss": None,
        "reward": None,
        "ok": 1.0,
        "non_finite": ["train/loss", "reward"],
    }
    assert series([row], "ok") == ([1], [1.0])
    assert series([row], "reward") == ([], [])


def test_resume_drops_what_came_after_and_an_iteration_is_never_written_twice(tmp_path):
    path = tmp_path / "metrics.jsonl"
    with MetricsLog(path) as log:
        for i in range(6):
            log.append(i, {"x": i / 3})
    before = path.read_text().splitlines()
    with MetricsLog(path) as log:
        with pytest.raises(InvariantError, match="already holds iteration 5"):
            log.append(5, {})
        log.truncate_after(3)
        assert path.read_text().splitlines() == before[:4]
        log.append(4, {"x": 4 / 3})
    assert path.read_text().splitlines() == before[:5]
    with MetricsLog(path) as log:
        log.truncate_after(-1)
        log.append(0, {})
    assert read_metrics(path) == [{"iteration": 0}]


def test_a_line_cut_off_by_a_kill_is_dropped_and_damage_elsewhere_is_an_error(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"iteration": 1, "x": 1.0}\n{"iteration": 2, "x"')
    assert read_metrics(path) == [{"iteration": 1, "x": 1.0}]
    with MetricsLog(path) as log:
        log.append(2, {"x": 2.0})
    assert [row["x"] for row in read_metrics(path)] == [1.0, 2.0]
    path.write_text('{"iteration": 1}\nhello\n{"iteration": 3}\n')
    with pytest.raises(CheckpointError, match=r"metrics\.jsonl:2 is damaged"):
        MetricsLog(path)


def test_events_and_spans_are_on_one_clock(tmp_path):
    log = EventLog(tmp_path / "events" / "driver.jsonl")
    start, taken = now(), Spans(log)
    with taken.span("generate", group=3, index=1):
        log.event("request sent", engine=0)
    with pytest.raises(KeyError), taken.span("reward"):
        raise KeyError("x")
    log.add_span("train", start_s=start, end_s=now())
    log.close()
    sent, generate, reward, train = map(json.loads, (tmp_path / "events" / "driver.jsonl").read_text().splitlines())
    rounded = 1e-6
    assert generate["time_s"] - rounded <= sent["time_s"] <= generate["time_s"] + generate["duration_s"] + rounded
    assert (generate["name"], generate["group"], generate["index"]) == ("generate", 3, 1)
    assert reward["error"] == "KeyError"
    assert "error" not in generate
    assert train["time_s"] == start
    assert train["duration_s"] >= generate["duration_s"] - 2 * rounded


def test_events_of_a_killed_process_are_read_up_to_its_last_whole_line(tmp_path):
    path = tmp_path / "e.jsonl"
    path.write_text('{"time_s": 1.0, "name": "a"}\n{"time_s": 2.0, "na')
    assert [event["name"] for event in read_events(path)] == ["a"]
    log = EventLog(path, flush_s=3600)
    log.event("b")
    assert [event["name"] for event in read_events(path)] == ["a"]
    log.flush()
    assert [event["name"] for event in read_events(path)] == ["a", "b"]
    log.close()
    path.write_text('{"time_s": 1.0, "name": "a"}\n[]\n')
    with pytest.raises(CheckpointError, match=r"e\.jsonl:2 is damaged"):
        read_events(path)


def test_event_files_are_bounded(tmp_path):
    log = EventLog(tmp_path / "e.jsonl", max_bytes=2000)
    for i in range(200):
        log.event("tick", i=i)
    log.close()
    assert {p.name for p in tmp_path.iterdir()} == {"e.jsonl", "e.old.jsonl"}
    assert all(p.stat().st_size < 2100 for p in tmp_path.iterdir())
    kept = [event["i"] for event in read_events(tmp_path / "e.jsonl")]
    assert kept == list(range(kept[0], 200))


def test_tensorboard_reads_scalars_and_pictures(tmp_path):
    picture = np.arange(8 * 16 * 3, dtype=np.uint8).reshape(8, 16, 3)
    log = TensorBoardLog(tmp_path)
    for i in range(4):
        log.scalars(i, {"reward/train_mean": i / 4, "train/loss": -float(i)})
    log.image(3, "samples", picture)
    log.close()
    resumed = TensorBoardLog(tmp_path, resume_after=2)
    resumed.scalars(3, {"reward/train_mean": 9.0})
    resumed.close()

    reader = EventAccumulator(str(tmp_path), size_guidance={"scalars": 0, "images": 0}).Reload()
    assert [(e.step, e.value) for e in reader.Scalars("reward/train_mean")] == [(0, 0), (1, 0.25), (2, 0.5), (3, 9.0)]
    assert [e.value for e in reader.Scalars("train/loss")] == [0, -1, -2]  # what came after iteration 2 is hidden
    events = [e for file in sorted(tmp_path.iterdir()) for e in EventFileLoader(str(file)).Load()]
    images = [v for e in events for v in e.summary.value if v.tag == "samples"]
    assert len(images) == 1


def test_grid_keeps_every_pixel_and_writes_captions(tmp_path):
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (5, 32, 64, 3), dtype=np.uint8)
    sheet = grid(
        images, ["0123", "a very long prompt that cannot fit below one picture", "", "x", "two\nlines"], columns=2
    )
    assert sheet[6 : 6 + 64 : 2, 6 : 6 + 128 : 2].tolist() == images[0].tolist()  # enlarged by 2
    below = 6 + 64 + 17 + 6
    assert sheet[below : below + 64 : 2, 6 + 134 : 6 + 134 + 128 : 2].tolist() == images[3].tolist()
    assert (sheet[6 + 64 : 6 + 64 + 17, 6:134] < 128).any()
    path = save_png(tmp_path / "new" / "grid.png", sheet)
    assert np.asarray(Image.open(path)).tolist() == sheet.tolist()
    assert [p.name for p in path.parent.iterdir()] == ["grid.png"]
    assert grid(images[:, :1, :1]).shape[2] == 3


def test_before_and_after_stand_above_each_other():
    before, after = np.zeros((3, 32, 64, 3), np.uint8), np.full((3, 32, 64, 3), 77, np.uint8)
    sheet = before_after(before, after, ["a", "b", "c"])
    black, grey = (sheet == 0).all(-1), (sheet == 77).all(-1)
    assert black.sum() >= 3 * 64 * 128
    assert grey.sum() >= 3 * 64 * 128
    assert np.flatnonzero(black.any(1)).min() < np.flatnonzero(grey.any(1)).min()
    with pytest.raises(ValueError, match="one shape"):
        before_after(before, after[:2])


@pytest.mark.parametrize(
    "wrong", [np.zeros((2, 8, 8, 3)), np.zeros((8, 8, 3), np.uint8), np.zeros((0, 8, 8, 3), np.uint8)]
)
def test_grid_refuses_what_is_no_picture(wrong):
    with pytest.raises(ValueError, match=r"uint8 \[N, H, W, 3\]"):
        grid(wrong)
    with pytest.raises(ValueError, match="1 captions for 2"):
        grid(np.zeros((2, 8, 8, 3), np.uint8), ["a"])


def test_moving_mean_is_over_the_last_seven():
    assert moving_mean([1.0, 3.0]) == [1.0, 2.0]
    assert moving_mean([float(i) for i in range(10)])[-1] == 6.0
    assert moving_mean([]) == []


def test_curve_draws_train_and_heldout(tmp_path):
    path = tmp_path / "metrics.jsonl"
    assert save_curve(path, tmp_path / "curve.png", title="none") is None
    with MetricsLog(path) as log:
        log.append(0, {"reward/heldout": 0.4})
        for i in range(1, 21):
            log.append(i, {"reward/train_mean": 0.4 + i / 50, **({"reward/heldout": 0.5} if i % 10 == 0 else {})})
    picture = np.asarray(
        Image.open(save_curve(path, tmp_path / "plots" / "curve.png", title="run")).convert("RGB")
    ).astype(int)
    blue = (abs(picture - [31, 119, 180]).sum(-1) < 30).sum()
    orange = (abs(picture - [255, 127, 14]).sum(-1) < 30).sum()
    assert blue > 500
    assert orange > 200


METRIC = re.compile(r"^(reward|rollout|policy|train|sync|perf)/[\w/]+$")


def test_every_metric_in_the_source_is_documented():
    documented = set(re.findall(r"^\| `([\w/<>]+)` \|", (ROOT / "docs" / "metrics.md").read_text(), re.MULTILINE))
    assert "reward/<name>/mean" in documented
    used = {}
    for path in (ROOT / "src").rglob("*.py"):
        tree = ast.parse(path.read_text())
        pieces = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
        for node in ast.walk(tree):
            whole = isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in pieces
            if whole and METRIC.match(node.value):
                used[node.value] = path.name
    assert {name: file for name, file in used.items() if name not in documented} == {}


def test_obs_imports_neither_torch_nor_matplotlib():
    code = (
        "import sys, verst.obs.metrics, verst.obs.events, verst.obs.tensorboard, verst.obs.images, verst.obs.curve, "
        "verst.obs.progress, verst.obs.summary; print(sorted({'torch', 'ray', 'matplotlib', 'tensorflow'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_file_has_changed_when_it_is_new_longer_another_or_gone(tmp_path: Path) -> None:
    one, two, stamps = tmp_path / "one", tmp_path / "two", Stamps()
    assert [stamps.changed(one), stamps.changed(one)] == [True, False]
    one.write_text("a")
    assert [stamps.changed(one), stamps.changed(one)] == [True, False]
    with one.open("a") as file:
        file.write("b")
    assert [stamps.changed(one), stamps.changed(one)] == [True, False]
    two.write_text("cd")
    assert stamps.changed(one, two)
    two.replace(one)  # as long as before
    assert [stamps.changed(one), stamps.changed(one)] == [True, False]
    one.unlink()
    assert [stamps.changed(two, one), stamps.changed(two, one)] == [True, False]


def test_rows_that_stay_are_written_whole(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    assert (keep_rows(path, {"n": int}, lambda row: True), path.exists()) == ([], False)
    path.write_text('{"n": 1}\n{"n": 2}\n{"n": 3}\n{"n": 4')
    assert keep_rows(path, {"n": int}, lambda row: row["n"] != 2) == [{"n": 1}, {"n": 3}]
    assert path.read_text() == '{"n": 1}\n{"n": 3}\n'
    path.write_text('{"m": 1}\n')
    with pytest.raises(CheckpointError, match=r"rows\.jsonl:1 is damaged: no n"):
        keep_rows(path, {"n": int}, lambda row: True)
    assert [p.name for p in tmp_path.iterdir()] == ["rows.jsonl"]
