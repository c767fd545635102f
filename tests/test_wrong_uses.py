"""Wrong uses, each with the one paragraph that it ends in: what, where, and what would be right. Nothing is begun."""

from __future__ import annotations

import io
import os
import re
import sys
from pathlib import Path

import pytest
from cli_fixtures import here
from run_fixtures import tiny_model, write_recipe

from verst.cli.main import main

NFT = 'algorithm={type="nft"}'
PLAIN = 'sampling.steps={type="none"}'
RECIPES = [
    (("trainer.learning_rate=1e-4",), "trainer.learning_rate = 0.0001 is not a key of the recipe; did you mean 'lr'?"),
    (("run.iterations=0",), "run.iterations = 0: input should be greater than 0"),
    (("run=3",), "run = 3 must be a table with keys such as name"),
    (('run.name="a/b"',), "run.name = 'a/b'"),
    (('run.device="tpu"',), "run.device = 'tpu': did you mean"),
    (("trainer",), "override 'trainer' must read section.key=value"),
    (("rewards.5.weight=2",), "5 must be a number below 1"),
    (('sampling.transition={type="sdee"}',), "sampling.transition.type = 'sdee': did you mean 'sde'?"),
    (('algorithm={type="flow_grp"}',), "algorithm.type = 'flow_grp': did you mean 'flow_grpo'?"),
    (("rollout.microgroup_size=3",), "rollout.microgroup_size = 3 does not divide rollout.group_size = 4"),
    (("trainer.ranks=3",), "trainer.ranks = 3 does not divide the 4 microgroups"),
    (("trainer.tile_size=3",), "trainer.tile_size = 3 neither divides rollout.microgroup_size = 2"),
    (("trainer.steps_per_rollout=3",), "trainer.steps_per_rollout = 3 does not divide rollout.num_groups = 2"),
    (
        ("rollout.group_size=1", "rollout.microgroup_size=1"),
        "rollout.group_size = 1 leaves every sample without another",
    ),
    ((PLAIN,), "sampling.steps.type = none makes no step stochastic"),
    (('sampling.transition={type="sde",eta=0.0}',), "sampling.transition.eta = 0 makes no step stochastic"),
    (("sampling.steps.high=9",), "sampling.steps.high = 9 is past sampling.num_steps = 4"),
    (("sampling.steps.high=4", 'sampling.transition.type="cps"'), "use steps with high = 3"),
    ((NFT,), "NFT trains on clean samples of a deterministic sampler; use none"),
    ((NFT, PLAIN), "sampling.shared_initial_noise = true"),
    (("algorithm.kl_beta=0.1",), "algorithm.reference = adapter_off needs model.finetune.type = lora"),
    (('eval.weights="ema"',), "eval.weights = ema needs trainer.ema_decay, e.g. 0.99"),
    (("rewards.0.weight=0.0",), "rewards: every weight is 0"),
    (('rewards=[{type="jpeg_size"},{type="jpeg_size"}]',), "give them a `name` of their own"),
    (('rewards=[{type="python",path="my rewards"}]',), "rewards.0.path = 'my rewards'"),
    (('cluster.placement={type="colocated"}', "engine.num=2"), "use engine.num = 1"),
    (('trainer.precision={master="forward"}',), 'use master = "float32"'),
    (('model.finetune={type="lora",init="no.safetensors"}',), "model.finetune.init = 'no.safetensors' does not exist"),
    (('prompts.train="nowhere.txt"',), "prompts.train = 'nowhere.txt' does not exist"),
    (('model.path="nowhere"',), "model.path = 'nowhere' does not exist"),
]
COMMANDS = [
    (("train", "no.toml"), "recipe no.toml does not exist"),
    (("train", "broken.toml"), "recipe broken.toml cannot be read"),
    (("plan", "recipe.toml", "--simulate", "--gpus", "0"), "--gpus 0 must be numbers from 1"),
    (("plan", "recipe.toml", "--simulate", "--memory"), "leave --steps and --memory out of this call"),
    (("plan", "recipe.toml", "--times", "times.toml"), "say what stages take for --simulate: add it"),
    (("eval", "."), "recipe.toml"),
    (("export", ".", "out"), "is no run folder"),
    (("replay", "."), "recipe.toml"),
    (("explain-ratio", ".", "1", "x"), "sample 'x' must read GROUP.INDEX"),
    (("generate", "empty", "a cat"), "is no run folder"),
    (("tiny", "sd9", "out"), "no tiny checkpoint is called 'sd9'"),
    (("init", "empty", "--out", "new.toml", "--yes"), "is no model folder in the diffusers layout"),
    (
        ("init", tiny_model(), "--out", "recipe.toml", "--yes"),
        "recipe.toml exists already; name another file with --out",
    ),
    (("convert-recipe", "no.txt", "--out", "new.toml"), "file no.txt does not exist"),
    (("triage", "empty"), "empty"),
    (("serve", "empty", "--port", "0"), "empty"),
]
USAGES = [
    (("trian", "a.toml"), "verst has no command 'trian': did you mean 'train'? valid: 'train', "),
    (("bench", "matrx"), "verst bench has no command 'matrx': did you mean 'matrix'?"),
    (("--nope",), "verst has no option '--nope'"),
    (
        ("train", "a.toml", "--quite"),
        "verst train has no option '--quite': did you mean '--quiet'? valid: '--if-complete'",
    ),
    (("train",), "missing argument 'recipe'"),
    (("generate", "model"), "missing argument 'prompts'"),
    (("serve", "model", "--port", "abc"), "--port abc: input should be a valid integer"),
    (("serve", "model", "--dtype=half"), "--dtype half: 'half' is not one of 'float32', 'bfloat16', 'float16'"),
    (("router", "--per-engine", "0"), "--per-engine 0: input should be greater than or equal to 1"),
    (("explain-ratio", ".", "x", "0.0"), "iteration: input should be a valid integer"),
    (("recipes", "a", "b"), "got unexpected extra argument(s) (b)"),
    (("train", "a.toml", "--quiet=3"), "option '--quiet' does not take a value"),
    (("dashboard", "runs", "--port"), "option '--port' requires an argument"),
]
"""What the command line itself refuses."""


def paragraph(capsys: pytest.CaptureFixture[str]) -> str:
    """What was said, which is nothing but one paragraph."""
    output, errors = capsys.readouterr()
    assert output == ""
    assert re.match(r"verst: \w+Error: ", errors)
    assert len(errors.splitlines()) == 1
    return errors


@pytest.mark.parametrize(("overrides", "words"), RECIPES, ids=[" ".join(overrides) for overrides, _ in RECIPES])
def test_a_wrong_recipe(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    overrides: tuple[str, ...],
    words: str,
) -> None:
    assert here(monkeypatch, "train", write_recipe(tmp_path), *overrides) == 2
    assert words in paragraph(capsys)
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(("arguments", "words"), COMMANDS, ids=[" ".join(map(str, c[:2])) for c, _ in COMMANDS])
def test_a_wrong_command(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: tuple[object, ...],
    words: str,
) -> None:
    write_recipe(tmp_path)
    os.rename(tmp_path / "recipe.toml", tmp_path / "empty.toml")
    (tmp_path / "empty").mkdir()
    (tmp_path / "broken.toml").write_text("[run\n")
    if "recipe.toml" in arguments:
        os.rename(tmp_path / "empty.toml", tmp_path / "recipe.toml")
    before = sorted(tmp_path.rglob("*"))
    monkeypatch.chdir(tmp_path)
    assert here(monkeypatch, *arguments) == 2
    assert words in paragraph(capsys)
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize(("arguments", "words"), USAGES, ids=[" ".join(arguments) for arguments, _ in USAGES])
def test_a_wrong_command_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], words: str
) -> None:
    assert here(monkeypatch, *arguments) == 2
    said = paragraph(capsys)
    assert said.startswith(f"verst: UsageError: {words}")
    assert re.search(r"; `verst( \S+)? --help` tells what there is\n$", said)


def test_a_group_without_a_command_shows_its_help_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert here(monkeypatch, "bench") == 2
    output, errors = capsys.readouterr()
    assert "matrix" in output
    assert errors == ""


def test_a_question_that_is_left_ends_in_a_paragraph(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    terminal = io.StringIO("")
    terminal.isatty = lambda: True  # type: ignore[method-assign]
    monkeypatch.setattr(sys, "stdin", terminal)
    assert here(monkeypatch, "init", tiny_model(), "--out", tmp_path / "new.toml") == 1
    assert capsys.readouterr().err.splitlines()[-1] == "verst: stopped at a question; nothing was written"
    assert list(tmp_path.iterdir()) == []


def test_debug_shows_the_traceback_wherever_it_stands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for arguments in (("--debug", "plan", tmp_path / "no.toml"), ("plan", tmp_path / "no.toml", "--debug")):
        monkeypatch.setattr(sys, "argv", ["verst", *map(str, arguments)])
        with pytest.raises(Exception, match=re.escape("no.toml does not exist")):
            main()


def test_a_file_that_cannot_be_written_is_a_paragraph_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    assert here(monkeypatch, "tiny", "sd3", tmp_path / "file" / "model") == 2
    assert str(tmp_path / "file") in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_scripts_ask_the_command(
    shell: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert here(monkeypatch, "completion", shell) == 0
    assert f"_VERST_COMPLETE=complete_{shell}" in capsys.readouterr().out
    monkeypatch.setenv("_VERST_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", "verst tri")
    monkeypatch.setenv("COMP_CWORD", "1")
    assert here(monkeypatch) == 0
    assert capsys.readouterr().out.split() == ["triage"]
