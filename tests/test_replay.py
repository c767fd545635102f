"""verst replay: a recorded run made again has the same bits, and what was changed in the record is named."""

import json
import shutil
from pathlib import Path

import pytest
from run_fixtures import metric_rows, run_to_end, write_recipe

from verst.cli import replay as command
from verst.errors import ConfigError


@pytest.mark.ray
def test_a_run_replays_bit_for_bit_but_for_what_was_changed_in_its_record(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, output = run_to_end(write_recipe(tmp_path), "run.iterations=2")
    assert code == 0, output
    run = tmp_path / "runs" / "run"
    rows = metric_rows(run)
    rows[-1]["train/loss"] += 1e-9
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    shutil.rmtree(run / "checkpoints" / "step_00000001")
    with pytest.raises(SystemExit):
        command.run(run, None)
    out = capsys.readouterr().out  # the planted difference is the only one
    assert "iterations 1 to 2 made again" in out
    assert "iteration 2: train/loss was" in out
    assert "1 differences" in out
    with pytest.raises(ConfigError, match=r"has not made iteration 3; it has made 1\.\.2"):
        command.run(run, 3)
