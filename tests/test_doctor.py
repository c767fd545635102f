"""`verst doctor`: each judgement on values that are given, and the command on this machine."""

from __future__ import annotations

import json
import resource
import shutil
import socket
from pathlib import Path

import pytest
from cli_fixtures import here
from run_fixtures import tiny_model, write_recipe

from verst.cli import doctor
from verst.cli.doctor import Finding, fit, package, packages, python, report
from verst.cli.doctor_machine import GIB, compiler, disk, gpus, nccl, open_files, ports, shared_memory
from verst.cli.doctor_target import broken_files, model_findings, target_findings


@pytest.mark.parametrize(
    ("found", "level", "words"),
    [
        (python("3.12.3", ">=3.11"), "ok", "3.12.3"),
        (python("3.10.9", ">=3.11"), "fail", "3.10.9, verst needs >=3.11"),
        (package("torch", ">=2.11", "2.11.0+cu130"), "ok", "2.11.0+cu130"),
        (package("torch", ">=2.11", "2.9.1"), "fail", "2.9.1, verst needs >=2.11"),
        (package("diffusers", ">=0.42.1,<0.43", "0.43.0"), "fail", "0.43.0"),
        (package("ray", ">=2.55", None), "fail", "not installed"),
        (gpus(None, [], [], hidden=False, why=""), "ok", "none"),
        (gpus("13.0", [], [], hidden=False, why=""), "warn", "none"),
        (gpus("13.0", ["H200, 140 GiB"], ["H200, 580.1"], hidden=False, why=""), "ok", "CUDA 13.0, driver 580.1"),
        (gpus(None, [], ["H200, 580.1"], hidden=False, why=""), "fail", "built for processors alone"),
        (gpus("13.0", [], ["H200, 535.2"], hidden=False, why="driver too old"), "fail", "cannot use: driver too old"),
        (gpus("13.0", [], ["H200, 580.1"], hidden=True, why=""), "warn", "CUDA_VISIBLE_DEVICES"),
        (nccl("2.27.3", 2), "ok", "2.27.3"),
        (nccl(None, 1), "warn", "none"),
        (nccl(None, 2), "fail", "none"),
        (disk(Path("/runs"), 20 * GIB), "ok", "20.0 GiB free in /runs"),
        (disk(Path("/runs"), 20 * GIB - 1), "warn", "/runs"),
        (disk(Path("/runs"), GIB - 1), "fail", "/runs"),
        (shared_memory(None), "ok", "has none"),
        (shared_memory(64 * 2**20), "warn", "0.06 GiB free, Ray's store is 0.25 GiB"),
        (shared_memory(256 * 2**20), "ok", "0.25 GiB"),
        (open_files(resource.RLIM_INFINITY), "ok", "any number"),
        (open_files(4096), "ok", "4096"),
        (open_files(1024), "warn", "1024 allowed"),
        (open_files(100), "fail", "100 allowed"),
        (compiler({"PATH": "/nowhere"}), "warn", "no compiler"),
        (compiler({"PATH": "/nowhere"}, asked=True), "fail", "no compiler"),
    ],
)
def test_what_is_found_is_judged(found: Finding, level: str, words: str) -> None:
    assert found.level == level
    assert words in found.text
    assert bool(found.remedy) == (level != "ok")


def test_only_requirements_without_extras_are_looked_at() -> None:
    have = {"torch": "2.13.0+cpu", "rich": "14.0"}
    asked = ["torch>=2.11", "rich>=14", "httpx>=0.28", 'wandb>=0.23; extra == "wandb"']
    found = packages(asked, have.get)
    assert [(f.name, f.level) for f in found] == [("torch", "ok"), ("httpx", "fail"), ("packages", "ok")]
    assert found[1].remedy == "pip install 'httpx>=0.28'"
    assert found[2].text == "1 others are as required"


def test_a_port_in_use_fails() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        found = ports(port, 1)
    assert found.level == "fail"
    assert f"{port} (" in found.text
    assert ports().level == "ok"


def test_report_in_lines() -> None:
    findings = [
        Finding(name="a", level="ok", text="one"),
        Finding(name="long", level="warn", text="two", remedy="do this"),
        Finding(name="b", level="fail", text="three", remedy="do that"),
    ]
    assert report(findings).splitlines() == [
        "ok    a     one",
        "warn  long  two",
        "            -> do this",
        "fail  b     three",
        "            -> do that",
        "1 ok, 1 warn, 1 fail",
    ]
    assert fit(findings[:2])


def test_a_broken_model_folder_is_named_piece_by_piece(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny_model(), folder)
    (whole,) = model_findings(folder)
    assert (whole.level, whole.text.split(",")[0]) == ("ok", "sd3")
    (folder / "transformer" / "x.safetensors").write_bytes(b"version https://git-lfs.github.com/spec/v1\n")
    shards = {"weight_map": {"a": "one.safetensors", "b": "x.safetensors"}}
    (folder / "transformer" / "x.safetensors.index.json").write_text(json.dumps(shards))
    (folder / "vae" / "y.safetensors.index.json").write_text("[]")
    shutil.rmtree(folder / "scheduler")
    assert list(broken_files(folder)) == [
        "folder scheduler is missing",
        "transformer/one.safetensors is missing",
        "vae/y.safetensors.index.json is no index of shards",
        "transformer/x.safetensors is a git-lfs pointer",
    ]
    (broken,) = model_findings(folder)
    assert broken.level == "fail"
    (none,) = model_findings(tmp_path)
    assert (none.level, "is no model folder" in none.text) == ("fail", True)


def test_a_recipe_is_asked_what_it_takes(tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path)
    assert {f.level for f in target_findings(recipe)} == {"ok"}
    (tmp_path / "train.txt").unlink()
    failed = [f for f in target_findings(recipe) if f.level == "fail"]
    assert [(f.name, f.text) for f in failed] == [
        ("files", f"prompts.train = '{tmp_path / 'train.txt'}' does not exist")
    ]
    (gone,) = target_findings(tmp_path / "no.toml")
    assert (gone.level, gone.text) == ("fail", f"recipe {tmp_path / 'no.toml'} does not exist")


def test_the_command_exits_with_1_where_something_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert here(monkeypatch, "doctor", "--json") == 0
    told = json.loads(capsys.readouterr().out)
    assert {"python", "torch", "diffusers", "ray", "gpu", "disk", "open files", "memfd", "c++"} <= {
        check["name"] for check in told["checks"]
    }
    assert here(monkeypatch, "doctor", tmp_path) == 1
    output = capsys.readouterr().out
    assert f"{tmp_path} is no model folder" in output
    assert "Traceback" not in output
    monkeypatch.setattr(doctor, "installed", lambda name: None if name == "peft" else "99")
    assert here(monkeypatch, "doctor", "--quiet") == 1
    lines = capsys.readouterr().out.splitlines()
    assert any("pip install 'peft>=0.21'" in line for line in lines)
    assert not any(line.startswith("ok ") for line in lines)
