"""The command line: what it says before anything costs, and the commands that need no Ray."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import av
import httpx
import numpy as np
import pytest
import torch
from cli_fixtures import here
from family_fixtures import tiny_folder
from PIL import Image
from run_fixtures import recipe_with, tiny_model, write_recipe

from verst.config.sections import JpegSizeReward
from verst.engine.resolve import resolve
from verst.engine.wire import GenerateRequest, decode_response
from verst.engine.worker import Worker
from verst.errors import ConfigError
from verst.families import recognise
from verst.rewards.base import RewardBatch
from verst.rewards.jpeg_size import JpegSize
from verst.rollout.plan import plan_evaluation
from verst.rollout.prompts import read_prompts
from verst.trainer import checkpoint
from verst.trainer.export import find_checkpoint

REPOSITORY = Path(__file__).parents[1]
RECIPES = sorted((REPOSITORY / "recipes").glob("*.toml"))
COMMAND = [sys.executable, "-m", "verst.cli.main"]
ENVIRONMENT = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "COLUMNS": "160"}


def verst(*arguments: object, cwd: Path = REPOSITORY) -> tuple[int, str, str]:
    """Exit code, output and errors of the command in a process of its own."""
    command = [*COMMAND, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=cwd, env=ENVIRONMENT, timeout=120)
    return done.returncode, done.stdout, done.stderr


def test_help_names_every_command() -> None:
    code, output, _ = verst("--help")
    assert code == 0
    for command in ("train", "plan", "eval", "generate", "serve", "export", "tiny"):
        assert re.search(rf"\b{command}\b", output)


def test_plan_shows_the_arithmetic(tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path)
    sizes = ("rollout.num_groups=6", "rollout.group_size=8", "rollout.microgroup_size=4", "trainer.tile_size=4")
    code, output, errors = verst("plan", recipe, *sizes, "trainer.ranks=2", "trainer.steps_per_rollout=3")
    assert (code, errors) == (0, "")
    for line in (
        "6 prompts x 8 = 48",
        "12 microgroups of 4",
        "48 samples x 2 steps = 96",
        "3 of 32 pairs",
        "4 of 4 pairs on each of 2 ranks",
        "exactly 1: tiles have the engine's batch shape",
        "3 iterations, 144 samples",
        'name = "run"',
        "tile_size = 4",
    ):
        assert line in output, output
    for role, count in (("engine", 1), ("trainer", 2), ("parser", 1), ("reward:jpeg_size", 1)):
        assert re.search(rf"{role}\W+{count}\b", output)
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_every_recipe_can_be_planned_and_prints_as_a_recipe(
    recipe: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(REPOSITORY)
    # Its own model need not be on this machine.
    assert here(monkeypatch, "plan", recipe, f"model.path={tiny_model()}") == 0
    assert f'name = "{recipe.stem}"' in capsys.readouterr().out


IMPORTS = """
import sys
from verst.cli.main import main
sys.argv = ["verst", *sys.argv[1:]]
try:
    main()
except SystemExit as end:
    assert not end.code, end.code
print("HEAVY", sorted({"torch", "ray", "diffusers", "transformers", "peft"} & set(sys.modules)))
"""


@pytest.mark.parametrize("arguments", [("--help",), ("train", "--help"), ("plan", "recipes/glyphs_grpo.toml")])
def test_help_and_plan_import_nothing_heavy(arguments: tuple[str, ...]) -> None:
    done = subprocess.run(
        [sys.executable, "-c", IMPORTS, *arguments], capture_output=True, text=True, cwd=REPOSITORY, env=ENVIRONMENT
    )
    assert done.returncode == 0, done.stderr
    assert "HEAVY []" in done.stdout


def test_what_is_wrong_is_said_in_one_paragraph(tmp_path: Path) -> None:
    """By the installed command; tests/test_wrong_uses.py has the list."""
    code, output, errors = verst("train", tmp_path / "no.toml")
    assert (code, output) == (2, "")
    assert errors == f"verst: ConfigError: recipe {tmp_path / 'no.toml'} does not exist\n"


def test_unknown_option_and_command_exit_with_2(tmp_path: Path) -> None:
    for arguments in (("trian",), ("train", write_recipe(tmp_path), "--fast")):
        code, _, errors = verst(*arguments)
        assert code == 2
        assert "Traceback" not in errors
        assert str(arguments[-1]) in errors


def test_tiny_writes_a_model_that_is_recognised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "model"
    assert here(monkeypatch, "tiny", "sd3", folder) == 0
    assert capsys.readouterr().out.strip().endswith(str(folder))
    assert recognise(folder).name == "sd3"
    assert here(monkeypatch, "tiny", "sd9", tmp_path / "other") == 2
    assert "no tiny checkpoint is called 'sd9'" in capsys.readouterr().err
    assert not (tmp_path / "other").exists()


SIZE = {"height": 32, "width": 64, "num_inference_steps": 3, "guidance_scale": 1.0, "max_sequence_length": 16}


def pictures(*prompts: str, seed: int) -> list[np.ndarray]:
    """What the engine makes."""
    worker = Worker(tiny_model())
    seeds = tuple(seed + i for i in range(len(prompts)))
    request = GenerateRequest(prompts=prompts, seeds=seeds, rollout=False, media_format="uint8", **SIZE)
    (records,) = worker.generate([resolve(request, worker.components)])
    assert not isinstance(records, Exception)
    return [record["media"][0].numpy() for record in records]


def test_generate_writes_the_engines_pictures(tmp_path: Path) -> None:
    options = ("--height", 32, "--width", 64, "--steps", 3, "--guidance", 1.0, "--max-sequence-length", 16)
    code, output, errors = verst(
        "generate", tiny_model(), "a cat", "a dog?", "--out", tmp_path, "--seed", 5, "--device", "cpu", *options
    )
    assert code == 0, errors
    paths = [tmp_path / "000_a_cat.png", tmp_path / "001_a_dog_.png"]
    assert output.split() == [str(path) for path in paths]
    for path, expected in zip(paths, pictures("a cat", "a dog?", seed=5), strict=True):
        got = np.array(Image.open(path))
        assert got.shape == (32, 64, 3)
        # Its threads are the machine's, ours is one.
        assert np.abs(got.astype(int) - expected.astype(int)).max() <= 1


def test_generate_writes_clips_with_their_sound(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = {"height": 32, "width": 64, "frames": 9, "fps": 8.0, "steps": 2, "guidance": 3.0, "max-sequence-length": 48}
    options = [word for name, value in sizes.items() for word in (f"--{name}", value)]
    folder = tiny_folder("ltx2.3")
    assert here(monkeypatch, "generate", folder, "a cat", "--out", tmp_path, "--device", "cpu", *options) == 0
    assert capsys.readouterr().out == f"{tmp_path / '000_a_cat.webm'}\n"
    with av.open(str(tmp_path / "000_a_cat.webm")) as clip:
        assert sum(1 for _ in clip.decode(video=0)) == 9
        assert (clip.streams.video[0].width, clip.streams.video[0].average_rate) == (64, 8)
        assert len(clip.streams.audio) == 1


def test_generate_refuses_what_it_cannot_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for model, extra, words in (
        (tiny_model(), ("--height", 33), "height = 33 is not a multiple of 16"),
        (tiny_model(), ("--max-sequence-length", 3), "which takes 3"),
        (tiny_model(), ("--steps", 0), "num_inference_steps = 0: Input should be greater than 0"),
        (tmp_path, (), "is no run folder"),
    ):
        code = here(monkeypatch, "generate", model, "a cat", "--out", tmp_path / "out", "--steps", 1, *extra)
        errors = capsys.readouterr().err.splitlines()[-1]
        assert code == 2
        assert errors.startswith("verst: ")
        assert words in errors
    assert not (tmp_path / "out").exists()


def test_eval_of_an_untrained_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = recipe_with(tmp_path)
    assert here(monkeypatch, "eval", tmp_path / "recipe.toml") == 0
    lines = dict(line.split(": ") for line in capsys.readouterr().out.splitlines() if line.startswith("reward/"))
    assert here(monkeypatch, "eval", tmp_path / "recipe.toml", "--json") == 0
    told = json.loads(capsys.readouterr().out)
    assert told["checkpoint"] is None
    assert {name: f"{value:.6g}" for name, value in told["metrics"].items() if name in lines} == lines
    worker, reward = Worker(tiny_model()), JpegSize(JpegSizeReward())
    (task,) = plan_evaluation(recipe, read_prompts(recipe.prompts.heldout))
    (records,) = worker.generate([resolve(task.request, worker.components)])
    assert not isinstance(records, Exception)
    values = reward.score(RewardBatch.plain(torch.stack([record["media"] for record in records]), task.prompts))
    assert lines.keys() == {"reward/heldout", "reward/heldout/jpeg_size"}
    assert float(lines["reward/heldout"]) == pytest.approx(sum(values) / 2, rel=1e-5)
    assert here(monkeypatch, "eval", tmp_path / "recipe.toml", 'watch={gold=[{type="brightness"}]}') == 0
    again = dict(line.split(": ") for line in capsys.readouterr().out.splitlines() if line.startswith("reward/"))
    assert again.pop("reward/gold/brightness")
    assert again == lines
    assert here(monkeypatch, "eval", tmp_path / "recipe.toml", "--checkpoint", "best") == 2
    assert "is a recipe, whose untrained model is evaluated; name a run" in capsys.readouterr().err


def test_a_checkpoint_is_named_newest_best_or_by_iteration(tmp_path: Path) -> None:
    def refusal(which: str) -> str:
        with pytest.raises(ConfigError) as error:
            find_checkpoint(tmp_path, which)
        return str(error.value)

    root = tmp_path / "checkpoints"
    assert refusal("newest") == f"{tmp_path} has no checkpoint; iterations saved: none"
    for iteration, best in ((2, None), (4, 4), (6, 4)):
        checkpoint.partial_folder(root, iteration).mkdir(parents=True)
        if iteration == 4:
            expected = f"{tmp_path} keeps no best checkpoint (checkpoint.keep_best); iterations saved: 2"
            assert refusal("best") == expected
        checkpoint.publish(root, iteration, {}, keep=3, best=best)
    assert find_checkpoint(tmp_path) == find_checkpoint(tmp_path, "newest") == checkpoint.step_folder(root, 6)
    assert find_checkpoint(tmp_path, "best") == checkpoint.step_folder(root, 4)
    assert find_checkpoint(tmp_path, "2") == checkpoint.step_folder(root, 2)
    assert refusal("3") == f"{tmp_path} has no checkpoint of iteration 3; iterations saved: 2, 4, 6"
    assert refusal("-1") == "checkpoint '-1' must be newest, best or an iteration; iterations saved: 2, 4, 6"


@contextmanager
def serving(*options: object) -> Iterator[tuple[subprocess.Popen[str], str]]:
    command = [*COMMAND, "serve", *map(str, options), "--port", "0", "--device", "cpu", "--threads", "1"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=ENVIRONMENT)
    assert process.stdout is not None
    try:
        yield process, process.stdout.readline().split()[-1]
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def test_serve_answers_and_ends_with_sigterm() -> None:
    with serving(tiny_model(), "--deterministic") as (process, url):
        with httpx.Client(
            base_url=url, transport=httpx.HTTPTransport(retries=5), trust_env=False, timeout=60
        ) as client:
            while client.get("/health").status_code == 503:
                assert process.poll() is None
            assert client.get("/health").status_code == 200
            body = {**SIZE, "prompt": "a cat", "seed": 5, "rollout": False, "media_format": "uint8"}
            answer = client.post("/rollout/generate", json=body)
            assert answer.status_code == 200
            (record,) = decode_response(answer.content)
            assert np.array_equal(record["media"][0].numpy(), pictures("a cat", seed=5)[0])
            wrong = client.post("/rollout/generate", json={**body, "guidance": 3})
            assert wrong.status_code == 422
            assert "did you mean 'guidance_scale'?" in wrong.json()["detail"]
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=60) in (0, -signal.SIGTERM)
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{url}/health", trust_env=False)


def test_serve_on_a_port_in_use(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert here(monkeypatch, "serve", tiny_model(), "--port", port, "--device", "cpu") == 2
    assert f"{port} is in use on 127.0.0.1" in capsys.readouterr().err


def test_export_of_what_is_no_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert here(monkeypatch, "export", tmp_path, tmp_path / "out") == 2
    assert f"{tmp_path} is no run folder" in capsys.readouterr().err
    run = tmp_path / "run"
    run.mkdir()
    recipe_with(tmp_path)
    (run / "recipe.toml").write_text((tmp_path / "recipe.toml").read_text())
    assert here(monkeypatch, "export", run, tmp_path / "out") == 2
    assert f"{run} has no checkpoint; iterations saved: none" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_debug_switch_shows_the_traceback(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ENVIRONMENT, "VERST_DEBUG", "1")
    code, _, errors = verst("plan", tmp_path / "no.toml")
    assert code == 1
    assert "Traceback" in errors
    assert "no.toml does not exist" in errors
