"""`verst init`: recipes that load, of families that are recognised, with sizes that fit."""

from __future__ import annotations

from pathlib import Path

import pytest
from cli_fixtures import here
from PIL import Image
from run_fixtures import WORDS, tiny_model

from verst.cli.init import ALGORITHMS, Wishes, answered, fitted, recipe_tables
from verst.cli.init_parts import Machine, look
from verst.cli.init_sft import sft_tables
from verst.cli.recipe_text import recipe_text, write_recipe
from verst.config import load_recipe, parse_recipe
from verst.config.recipe import RlRecipe, SftRecipe
from verst.config.sections import ColocatedPlacement, NoSteps, WindowSteps
from verst.errors import ConfigError, DataError
from verst.families import Geometry, SamplingDefaults, recognise
from verst.families.tiny import build_tiny
from verst.loops.memory_plan import memory_plan
from verst.trainer.estimate import peak_of

GIB = 2**30


def prompts(folder: Path) -> tuple[Path, Path]:
    train, heldout = folder / "train.txt", folder / "heldout.txt"
    train.write_text("\n".join(WORDS))
    heldout.write_text("a yellow bus\na big dog\n")
    return train, heldout


def told(folder: Path, **more: str | bool) -> Wishes:
    train, heldout = prompts(folder)
    return answered(Wishes(train=train, heldout=heldout, **more), None)  # type: ignore[arg-type]


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("full", [False, True])
def test_every_algorithm_has_a_recipe_that_loads(tmp_path: Path, algorithm: str, full: bool) -> None:
    family, defaults, geometry = look(tiny_model())
    said = told(tmp_path, algorithm=algorithm, full=full)
    machine = Machine(gpus=3, memory=80 * GIB)
    tables = recipe_tables(tiny_model(), "mine", family, defaults, geometry, said, machine)
    recipe = write_recipe(tmp_path / "mine.toml", tables, ["a line"])
    assert load_recipe(tmp_path / "mine.toml") == recipe
    assert isinstance(recipe, RlRecipe)
    assert (recipe.algorithm.type, recipe.model.finetune.type) == (algorithm, "full" if full else "lora")
    recorded = algorithm in ("flow_grpo", "grpo_guard")
    assert isinstance(recipe.sampling.steps, WindowSteps if recorded else NoSteps)
    assert recipe.sampling.guidance_scale == (7.0 if recorded else 1.0)
    # Two of the three: what divides the microgroups of a rollout.
    assert (recipe.trainer.ranks, recipe.engine.num, recipe.model.dtype) == (2, 2, "bfloat16")
    assert isinstance(recipe.cluster.placement, ColocatedPlacement)


def test_sizes_follow_the_memory(tmp_path: Path) -> None:
    family, defaults, geometry = look(tiny_model())
    said = told(tmp_path)
    tables = recipe_tables(tiny_model(), "mine", family, defaults, geometry, said, Machine(gpus=0, memory=0))

    def needed(rows: int, checkpointing: str) -> int:
        changed = {
            **tables,
            "rollout": {**tables["rollout"], "microgroup_size": rows},
            "trainer": {**tables["trainer"], "tile_size": rows, "activation_checkpointing": checkpointing},
            "engine": {"num": 1, "max_batch": rows},
        }
        recipe = parse_recipe(changed)
        assert isinstance(recipe, RlRecipe)
        plan = memory_plan(recipe)
        return peak_of(plan.trainer) + peak_of(plan.engine)

    for memory, rows, checkpointing in (
        (int(needed(8, "none") / 0.9) + 2, 8, "none"),
        (int(needed(4, "none") / 0.9) + 2, 4, "none"),
        (1, 1, "full"),
    ):
        got, note = fitted(tables, Machine(gpus=0, memory=memory))
        assert got["rollout"]["microgroup_size"] == got["trainer"]["tile_size"] == got["engine"]["max_batch"] == rows
        assert got["trainer"]["activation_checkpointing"] == checkpointing
        assert ("more than there is" in note) == (memory == 1)


def test_a_model_that_cannot_be_traced_is_given_a_guess(tmp_path: Path) -> None:
    folder = build_tiny("wan2.1", tmp_path / "wan")
    family, defaults, geometry = look(folder)
    assert (geometry.height, geometry.width, geometry.num_frames) == (480, 832, 5)
    machine = Machine(gpus=0, memory=GIB)
    tables = recipe_tables(folder, "mine", family, defaults, geometry, told(tmp_path, algorithm="nft"), machine)
    # Its table of positions ends at 32, and this width takes 52 of them.
    got, note = fitted(tables, machine)
    assert (got["trainer"]["tile_size"], got["trainer"]["activation_checkpointing"]) == (4, "full")
    assert note.startswith("Batches are a guess")


def test_a_large_image_and_a_long_clip_are_trained_smaller(tmp_path: Path) -> None:
    family = recognise(tiny_model())

    def size(geometry: Geometry, trained: Geometry) -> dict[str, object]:
        defaults = SamplingDefaults(
            geometry=geometry, num_steps=4, guidance_scale=5.0, negative_prompt="", max_sequence_length=77
        )
        machine = Machine(gpus=1, memory=GIB)
        sampling: dict[str, object] = recipe_tables(
            tiny_model(), "x", family, defaults, trained, told(tmp_path), machine
        )["sampling"]
        return sampling

    clip = size(Geometry(height=480, width=832, num_frames=81), Geometry(height=480, width=832, num_frames=5))
    assert (clip["num_frames"], clip["num_steps"]) == (5, 4)
    assert clip["steps"] == {"type": "window", "size": 2, "low": 0, "high": 2}
    assert "num_frames" not in size(Geometry(height=64, width=64), Geometry(height=64, width=64))


def test_questions_are_asked_only_for_what_was_not_said(tmp_path: Path) -> None:
    asked = []

    def ask(question: str, default: str) -> str:
        asked.append(question.split(" (")[0])
        return {"Reward": "python", "Its module:function": "my:reward"}.get(asked[-1], default)

    said = answered(Wishes(algorithm="nft", train=tmp_path / "a.txt"), ask)
    assert asked == ["Reward", "Its module:function", "File of held-out prompts"]
    assert (said.algorithm, said.reward, said.reward_path) == ("nft", "python", "my:reward")
    assert (said.train, said.heldout) == (tmp_path / "a.txt", Path("data/prompts/signs_heldout.txt"))


@pytest.mark.parametrize(
    ("wishes", "words"),
    [
        (Wishes(algorithm="ppo"), "--algorithm ppo is none that verst init writes; there are: flow_grpo"),
        (Wishes(reward="beauty"), "--reward beauty"),
        (Wishes(reward="pick_score"), "--reward pick_score needs --reward-path: the folder of the reward's model"),
        (Wishes(algorithm="sft"), "--algorithm sft needs --data: a folder, a .jsonl"),
        (Wishes(algorithm="nft", data=Path("a")), "--data a is for sft: nft learns from prompts, which --train names"),
        (Wishes(data=Path("a"), train=Path("b")), "--train b is for prompts: sft learns from --data"),
        (Wishes(data=Path("a"), heldout=Path("b")), "--heldout b is for prompts that a reward judges"),
        (Wishes(data=Path("a"), reward="python"), "--reward python needs --reward-path: the module:function"),
    ],
)
def test_wishes_that_cannot_be_had(wishes: Wishes, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        answered(wishes, None)


def test_the_command_writes_once_and_never_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    train, heldout = prompts(tmp_path)
    out = tmp_path / "my digits.toml"
    options = ("--out", out, "--reward", "jpeg_size", "--train", train, "--heldout", heldout, "--yes")
    assert here(monkeypatch, "init", tiny_model(), *options) == 0
    assert "sd3 with flow_grpo" in capsys.readouterr().out
    recipe = load_recipe(out)
    assert isinstance(recipe, RlRecipe)
    assert (recipe.run.name, recipe.model.path, recipe.rewards[0].type) == ("mydigits", tiny_model(), "jpeg_size")
    text = out.read_text()
    assert "num_groups = 8  # Prompts of one rollout.\n" in text
    assert here(monkeypatch, "init", tiny_model(), *options) == 2
    assert f"{out} exists already" in capsys.readouterr().err
    assert out.read_text() == text
    assert here(monkeypatch, "init", tmp_path, "--out", tmp_path / "b.toml", "--yes") == 2
    assert "is no model folder" in capsys.readouterr().err
    assert here(monkeypatch, "init", tiny_model(), "--out", tmp_path / "no" / "b.toml", "--yes") == 2
    assert f"folder {tmp_path / 'no'} does not exist" in capsys.readouterr().err
    assert not (tmp_path / "b.toml").exists()


def pictures(folder: Path, count: int = 30) -> Path:
    """A folder of pictures with captions, and one that has none."""
    folder.mkdir()
    for number in range(count):
        Image.new("RGB", (64, 64), (number, 0, 0)).save(folder / f"{number:02d}.png")
        (folder / f"{number:02d}.txt").write_text(f"a red square, number {number}")
    Image.new("RGB", (64, 64)).save(folder / "alone.png")
    return folder


def test_sft_from_a_folder_is_a_recipe_that_can_be_planned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out, source = tmp_path / "mine.toml", pictures(tmp_path / "pictures")
    assert here(monkeypatch, "init", tiny_model(), "--out", out, "--data", source, "--yes") == 0
    said, errors = capsys.readouterr()
    assert "sd3 with sft" in said
    assert "30 items were found, and 1 that cannot be used (data.on_bad_file); 3 are held out" in said
    assert "does not exist" not in errors
    recipe = load_recipe(out)
    assert isinstance(recipe, SftRecipe)
    assert (recipe.data.type, recipe.data.heldout, recipe.rewards, recipe.prompts) == ("folder", 3, (), None)
    assert (recipe.model.finetune.type, recipe.algorithm.batch_size) == ("lora", 16)
    assert here(monkeypatch, "plan", out, "--memory") == 0
    text = capsys.readouterr().out
    assert "memory of the run, GiB" in text
    assert "memory of an engine" not in text
    rewarded = ("--reward", "jpeg_size", "--heldout", prompts(tmp_path)[1], "--full", "--yes")
    other = tmp_path / "other.toml"
    assert here(monkeypatch, "init", tiny_model(), "--out", other, "--data", source, *rewarded) == 0
    recipe = load_recipe(other)
    assert isinstance(recipe, SftRecipe)
    assert ([r.type for r in recipe.rewards], recipe.model.finetune.type) == (["jpeg_size"], "full")
    assert here(monkeypatch, "plan", other) == 0


def test_a_source_is_known_by_its_name_and_may_be_still_to_come(tmp_path: Path) -> None:
    family, defaults, geometry = look(tiny_model())

    def table(source: Path) -> dict[str, object]:
        tables, notes = sft_tables(
            tiny_model(), "x", family, defaults, geometry, source, Machine(gpus=1, memory=GIB), full=False
        )
        assert notes == []
        assert isinstance(parse_recipe(tables), SftRecipe)
        data: dict[str, object] = tables["data"]
        return data

    assert table(tmp_path / "no")["type"] == "folder"
    assert table(tmp_path / "no.parquet") == {
        "type": "manifest",
        "path": str(tmp_path / "no.parquet"),
        "heldout": 16,
        "cache": {"folder": "build/x_cache"},
    }
    assert table(tmp_path / "no" / "a-{00..12}.tar")["shards"] == str(tmp_path / "no" / "a-{00..12}.tar")
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=r"--data .*empty: data\.type = folder: no usable item was found"):
        table(tmp_path / "empty")


def test_sizes_of_sft_follow_the_memory(tmp_path: Path) -> None:
    family, defaults, geometry = look(tiny_model())
    tables, _ = sft_tables(
        tiny_model(), "x", family, defaults, geometry, tmp_path / "no", Machine(gpus=0, memory=0), full=False
    )

    def needed(rows: int, checkpointing: str) -> int:
        trainer = {**tables["trainer"], "tile_size": rows, "activation_checkpointing": checkpointing}
        return memory_plan(parse_recipe({**tables, "trainer": trainer})).trainer_peak_bytes

    assert needed(8, "none") > needed(4, "none") > needed(4, "full") > needed(1, "full")
    for memory, rows, checkpointing in (
        (int(needed(8, "none") / 0.9) + 2, 8, "none"),
        (int(needed(4, "none") / 0.9) + 2, 4, "none"),
        (1, 1, "full"),
    ):
        got, note = fitted(tables, Machine(gpus=0, memory=memory))
        assert (got["trainer"]["tile_size"], got["trainer"]["activation_checkpointing"]) == (rows, checkpointing)
        assert got["eval"]["batch_size"] == rows
        assert note.startswith("It takes about")


def test_sft_is_asked_for_by_question_too() -> None:
    asked = []

    def ask(question: str, default: str) -> str:
        asked.append(question.split(" (")[0].split(":")[0])
        return {"Algorithm": "sft", "Pictures or clips with captions": "photos"}.get(asked[-1], default)

    said = answered(Wishes(), ask)
    assert asked == ["Algorithm", "Pictures or clips with captions", "Reward of held-out samples"]
    assert (said.algorithm, said.data, said.reward, said.heldout) == ("sft", Path("photos"), None, None)


def test_strings_are_written_as_toml(tmp_path: Path) -> None:
    family, defaults, geometry = look(tiny_model())
    machine = Machine(gpus=0, memory=GIB)
    tables = recipe_tables(tiny_model(), "x", family, defaults, geometry, told(tmp_path), machine)
    tables["sampling"]["negative_prompt"] = 'say "no" \\ or\nno'
    path = tmp_path / "x.toml"
    recipe = write_recipe(path, tables, [])
    assert load_recipe(path) == recipe
    assert recipe.sampling.negative_prompt == 'say "no" \\ or\nno'
    assert recipe_text(tables, []) == path.read_text()
