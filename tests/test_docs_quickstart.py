"""docs/quickstart.md does what it says: its files are written and its blocks run, in a folder with what a clone has."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from cli_fixtures import here
from docs_fixtures import ROOT, blocks
from safetensors.torch import load_file

from verst.config import load_recipe

PAGE = (ROOT / "docs" / "quickstart.md").read_text()
NOT_RUN = {"needs a network", "needs a GPU", "takes 5 to 8 minutes on two cores", "serves until Ctrl-C"}


def title(text: str) -> str:
    return text.removeprefix('title="').removesuffix('"')


@pytest.fixture
def clone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with what the page uses of a clone, and the files that it says to save."""
    for name in ("recipes", "checkpoints", "data"):
        (tmp_path / name).symlink_to(ROOT / name)
    for name, text in blocks(PAGE, "python", "text"):
        (tmp_path / title(name)).parent.mkdir(exist_ok=True)
        (tmp_path / title(name)).write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.delitem(sys.modules, "my_rewards", raising=False)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def commands() -> list[list[str]]:
    """Words behind `verst` of all that is to be run."""
    lines = [
        line
        for name, text in blocks(PAGE, "sh")
        if not name
        for line in text.replace("\\\n", " ").splitlines()
        if line.strip()
    ]
    words = [shlex.split(line) for line in lines]
    assert {word[0] for word in words} == {"verst"}
    return [word[1:] for word in words]


@pytest.mark.ray
def test_every_block_runs(clone: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for words in commands():
        if words[0] == "train":  # Ray wants a process of its own, and to be told of CPUs where others run beside it
            ray = () if words[1] == "learn.toml" else ("cluster.num_cpus=2",)  # SFT is one process
            command = [sys.executable, "-m", "verst.cli.main", *words, "run.threads=1", *ray]
            done = subprocess.run(command, capture_output=True, text=True, timeout=300)
            assert done.returncode == 0, done.stderr
        else:
            # What doctor finds is the machine's affair.
            allowed = {0, 1} if words[0] == "doctor" else {0}
            assert here(monkeypatch, *words) in allowed, words
    assert "metrics" in (clone / "ink.html").read_text()
    assert len(list((clone / "pictures").glob("*.png"))) == 2
    assert (clone / "my_pipeline" / "model_index.json").exists()
    assert all("lora" in name for name in load_file(clone / "my_lora" / "pytorch_lora_weights.safetensors"))
    assert (clone / "learned" / "000_314.png").exists()
    recipe = load_recipe(clone / "mine.toml")
    assert (str(recipe.model.path), recipe.rewards[0].type) == ("my_model", "python")


def test_what_is_not_run_says_why_and_could_be_typed() -> None:
    told = {title(name) for name, _ in blocks(PAGE, "sh") if name}
    assert told == NOT_RUN
    assert len(commands()) >= 10
    assert set(re.findall(r"^```(\w+)", PAGE, re.MULTILINE)) == {"sh", "python", "text"}
    for _, text in blocks(PAGE, "sh"):
        subprocess.run(["bash", "-n", "-c", text], check=True)
