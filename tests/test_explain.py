"""explain-ratio: agreement is found where there is some, and a planted difference is named."""

import json
from pathlib import Path

import pytest
import tomli_w
import torch
from run_fixtures import base_tables
from torch import nn

from verst.cli import explain as command
from verst.config import parse_recipe
from verst.errors import ConfigError
from verst.loops.explain import explain_ratio
from verst.loops.run_folder import dump


def run_folder(folder: Path, **sections: dict[str, object]) -> Path:
    tables = base_tables(folder)
    for section, values in sections.items():
        tables[section] = {**tables[section], **values}
    run = folder / "a_run"
    run.mkdir()
    (run / "recipe.toml").write_text(tomli_w.dumps(dump(parse_recipe(tables))))
    return run


@pytest.mark.parametrize("guidance", [1.0, 4.0])
def test_without_a_fault_every_tensor_is_equal(tmp_path: Path, guidance: float) -> None:
    run = run_folder(tmp_path, sampling={"guidance_scale": guidance})
    found = explain_ratio(run, 1, 0, 1)
    assert found.steps
    for step in found.steps:
        assert step.ratio == 1.0
        assert step.log_prob_engine == step.log_prob_trainer
        assert step.differing == ()
        assert step.compared > 50
    assert found.first is None


def test_a_changed_weight_is_named_with_its_module(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def perturb(transformer: nn.Module) -> None:
        with torch.no_grad():
            transformer.get_parameter("transformer_blocks.1.attn.to_q.weight").mul_(1.5)

    run = run_folder(tmp_path)
    found = explain_ratio(run, 1, 1, 0, perturb=perturb)
    assert found.first is not None
    assert found.first.name == "transformer_blocks.1.attn.to_q"
    assert found.first.largest > 0
    assert found.steps[0].ratio != 1.0
    command.run(run, 1, "1.0")
    assert "agree in every tensor" in capsys.readouterr().out
    command.run(run, 1, "1.0", as_json=True)
    told = json.loads(capsys.readouterr().out)
    assert (told["group"], told["index"], told["exact"]) == (1, 0, True)
    assert [step["ratio"] for step in told["steps"]] == [1.0] * len(told["steps"])


def test_what_cannot_be_explained_is_refused(tmp_path: Path) -> None:
    run = run_folder(tmp_path)
    with pytest.raises(ConfigError, match="no checkpoint of iteration 1"):
        explain_ratio(run, 2, 0, 0)
    with pytest.raises(ConfigError, match=r"no sample 99\.0: groups are 0\.\."):
        explain_ratio(run, 1, 99, 0)
    with pytest.raises(ConfigError, match=r"iteration 0 is not among 1\.\.3"):
        explain_ratio(run, 0, 0, 0)
    with pytest.raises(ConfigError, match=r"must read GROUP\.INDEX"):
        command.run(run, 1, "7")
