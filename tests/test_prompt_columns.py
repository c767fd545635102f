"""Columns of prompt files: overrides of single rows, pictures, and everything that is wrong with them."""

from __future__ import annotations

import asyncio
import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from run_fixtures import recipe_with, tiny_model

from verst.config.recipe import RlRecipe
from verst.engine.resolve import resolve
from verst.engine.worker import Worker
from verst.errors import ConfigError, PromptError, RequestError
from verst.flow.noise import derive_seed
from verst.loops.prompt_checks import ask_engine, check_prompts
from verst.obs.images import padded
from verst.rollout.columns import _COLUMNS, Overrides
from verst.rollout.plan import plan_group
from verst.rollout.prompts import Prompt, read_prompts
from verst.rollout.rows import check_rows

FULL = {
    "height": 64,
    "width": 128,
    "num_frames": 5,
    "fps": 8.0,
    "num_steps": 3,
    "negative_prompt": "blurry",
    "seed": 7,
    "reward": ["jpeg_size"],
}


def lines(folder: Path, *rows: dict[str, Any], name: str = "p.jsonl") -> Path:
    path = folder / name
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def table(folder: Path, **columns: Any) -> Path:
    path = folder / "p.parquet"
    pq.write_table(pa.table(columns), path)
    return path


def test_every_override_is_a_column_and_every_column_is_read(tmp_path: Path) -> None:
    assert {f.name for f in fields(Overrides)} == set(FULL)
    assert set(FULL) | {"image", "audio"} == set(_COLUMNS)
    expected = Overrides(**{**FULL, "reward": ("jpeg_size",)})  # type: ignore[arg-type]
    (row,) = read_prompts(lines(tmp_path, {"prompt": "a", "level": 2, **FULL}))
    assert (row.overrides, row.metadata) == (expected, {"level": 2})
    csv = tmp_path / "p.csv"
    csv.write_text("prompt,level," + ",".join(FULL) + "\na,2,64,128,5,8,3,blurry,7,jpeg_size\nb,,,,,,,,,\n")
    first, empty = read_prompts(csv)
    assert (first.overrides, first.metadata) == (expected, {"level": "2"})
    assert (empty.overrides, empty.metadata) == (Overrides(), {})


def test_parquet_empty_cells_and_nan_are_unset(tmp_path: Path) -> None:
    path = table(
        tmp_path,
        prompt=["a", "b", "c"],
        height=pa.array([64.0, float("nan"), None]),  # whole numbers with holes, as pandas writes them
        reward=pa.array([["x", "y"], None, None], pa.list_(pa.string())),
        include=[[{"class": "bench", "count": 1}], None, []],
        level=pa.array([1, None, 3]),
    )
    rows = read_prompts(path)
    assert [row.overrides for row in rows] == [Overrides(height=64, reward=("x", "y")), Overrides(), Overrides()]
    assert rows[0].metadata == {"include": [{"class": "bench", "count": 1}], "level": 1}
    assert (rows[1].metadata, rows[2].metadata) == ({}, {"include": [], "level": 3})
    assert rows[2].where == f"{path}: row 3"


def test_geneval_metadata_is_a_jsonl_file(tmp_path: Path) -> None:
    row = {
        "tag": "counting",
        "include": [{"class": "clock", "count": 3}],
        "exclude": [{"class": "clock", "count": 4}],
        "prompt": "a photo of three clocks",
    }
    (prompt,) = read_prompts(lines(tmp_path, row))
    assert prompt.text == "a photo of three clocks"
    assert prompt.metadata == {key: value for key, value in row.items() if key != "prompt"}
    assert prompt.overrides == Overrides()


def test_pictures_are_found_beside_the_prompt_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "pictures").mkdir()
    for name in ("a.png", "b.png"):
        (tmp_path / "pictures" / name).write_bytes(b"")
    (tmp_path / "s.wav").write_bytes(b"")
    lines(tmp_path, {"prompt": "x", "image": "pictures/a.png"}, {"prompt": "y", "audio": "s.wav"})
    (tmp_path / "p.csv").write_text("prompt,image\nx,pictures/a.png; pictures/b.png\n")
    monkeypatch.chdir(tmp_path.parent)
    one, two = read_prompts(Path(tmp_path.name) / "p.jsonl")
    assert one.images == (str(tmp_path / "pictures" / "a.png"),)
    assert (two.images, two.audio) == ((), str(tmp_path / "s.wav"))
    assert "image" not in one.metadata
    (both,) = read_prompts(tmp_path / "p.csv")
    assert both.images == tuple(str(tmp_path / "pictures" / name) for name in ("a.png", "b.png"))


BAD: list[tuple[dict[str, Any], str]] = [
    ({"height": "tall"}, r"p\.jsonl:2: `height` must be a whole number of at least 1, got 'tall'"),
    ({"height": 0}, "`height` must be a whole number of at least 1, got 0"),
    ({"num_steps": 2.5}, "`num_steps` must be a whole number"),
    ({"width": True}, "`width` must be a whole number"),
    ({"fps": -1}, "`fps` must be a number above 0"),
    ({"seed": 2**63}, "`seed` must be a whole number from 0"),
    ({"negative_prompt": 3}, "`negative_prompt` must be a text, got 3"),
    ({"reward": []}, "`reward` must be the name of a reward or a list of them"),
    ({"reward": ["a", 1]}, "`reward` must be"),
    ({"image": 7}, "`image` must be a path or a list of paths, got 7"),
    ({"image": "absent.png"}, r"p\.jsonl:2: `image` names absent\.png, but there is no file .*absent\.png"),
    ({"audio": "absent.wav"}, r"`audio` names absent\.wav, but there is no file"),
    ({"heigth": 64}, "no column `heigth`; did you mean `height`"),
    ({"Width": 64}, "no column `Width`; did you mean `width`"),
    ({"negative-prompt": "x"}, "did you mean `negative_prompt`"),
    ({"num_inference_steps": 4}, "did you mean `num_steps`"),
    ({"images": ["a.png"]}, "did you mean `image`"),
    ({"guidance_scale": 4.0}, r"a row cannot set `guidance_scale`: sampling\.guidance_scale is one for the run"),
]


@pytest.mark.parametrize(("row", "message"), BAD)
def test_bad_values_name_file_line_and_column(tmp_path: Path, row: dict[str, Any], message: str) -> None:
    with pytest.raises(PromptError, match=message):
        read_prompts(lines(tmp_path, {"prompt": "good"}, {"prompt": "bad", **row}))


def test_columns_that_only_look_a_little_like_ours_are_free(tmp_path: Path) -> None:
    row = {"weight": 2, "tag": "x", "id": 1, "prompt_id": 3, "steps_taken": 4, "size": [1, 2], "reward_model": {}}
    assert read_prompts(lines(tmp_path, {"prompt": "a", **row}))[0].metadata == row


def test_bad_tables(tmp_path: Path) -> None:
    with pytest.raises(PromptError, match=r"p\.parquet: no column `prompt` among \['text'\]"):
        read_prompts(table(tmp_path, text=["a"]))
    with pytest.raises(PromptError, match=r"p\.parquet: row 2: `prompt` must be a text, got None"):
        read_prompts(table(tmp_path, prompt=["a", None]))
    with pytest.raises(PromptError, match=r"p\.parquet holds no prompt"):
        read_prompts(table(tmp_path, prompt=pa.array([], pa.string())))
    with pytest.raises(PromptError, match=r"row 1: `height` must be a whole number of at least 1, got 64\.5"):
        read_prompts(table(tmp_path, prompt=["a"], height=[64.5]))
    (tmp_path / "p.parquet").write_bytes(b"no table")
    with pytest.raises(PromptError, match=r"p\.parquet cannot be read as Parquet"):
        read_prompts(tmp_path / "p.parquet")
    latin = pa.Array.from_buffers(
        pa.string(), 1, [None, pa.py_buffer(np.array([0, 1], np.int32).tobytes()), pa.py_buffer(b"\xfc")]
    )
    with pytest.raises(PromptError, match=r"cannot be read as Parquet .*utf-8"):
        read_prompts(table(tmp_path, prompt=latin))
    with pytest.raises(PromptError, match=r"absent\.parquet cannot be read as Parquet .*No such file"):
        read_prompts(tmp_path / "absent.parquet")
    (tmp_path / "n.jsonl").write_text('{"prompt": "a", "height": NaN}\n')
    with pytest.raises(PromptError, match=r"n\.jsonl:1: NaN is no JSON value"):
        read_prompts(tmp_path / "n.jsonl")
    (tmp_path / "c.csv").write_text("prompt,height\na,nan\n")
    with pytest.raises(PromptError, match=r"c\.csv:2: `height` must be a whole number of at least 1, got nan"):
        read_prompts(tmp_path / "c.csv")
    (tmp_path / "c.csv").write_text("prompt,x,x\na,1,2\n")
    with pytest.raises(PromptError, match=r"c\.csv:1: the header names x twice"):
        read_prompts(tmp_path / "c.csv")


def of_row(overrides: Overrides, where: str = "p.jsonl:4", **more: Any) -> Prompt:
    return Prompt(text="a cat", index=0, where=where, overrides=overrides, **more)


def test_a_row_is_sampled_as_it_says(tmp_path: Path) -> None:
    recipe = recipe_with(tmp_path, "sampling.steps={type='all'}")
    overrides = Overrides(height=32, num_steps=3, negative_prompt="", seed=9, reward=("jpeg_size",))
    first, second = plan_group(recipe, of_row(overrides), rollout=2, group=5)
    request = first.request
    assert (request.height, request.width, request.num_inference_steps) == (32, 64, 3)
    assert request.rollout_sde_step_indices == (0, 1, 2)
    assert request.rollout_return_step_indices == (0, 1, 2, 3)
    assert request.seeds == (derive_seed(9, "sample", 2, 5, 0), derive_seed(9, "sample", 2, 5, 1))
    assert first.rewards == second.rewards == ("jpeg_size",)
    plain = plan_group(recipe, of_row(Overrides()), rollout=2, group=5)[0]
    assert (plain.rewards, plain.request.num_inference_steps) == (None, 4)
    assert plain.request.seeds == (derive_seed(3, "sample", 2, 5, 0), derive_seed(3, "sample", 2, 5, 1))


def test_rules_of_the_recipe_hold_for_every_row(tmp_path: Path) -> None:
    recipe = recipe_with(tmp_path)  # a window inside [0, 3) of 4 steps
    good, short = of_row(Overrides(num_steps=3)), of_row(Overrides(num_steps=2), "p.jsonl:9")
    check_rows(recipe, [good], [short])  # held-out rows have no window
    with pytest.raises(
        PromptError, match=r"^p\.jsonl:9: with num_steps = 2 of this row: sampling\.steps\.high = 3 is past"
    ):
        check_rows(recipe, [good, short], [])
    with pytest.raises(PromptError, match=r"p\.jsonl:4: `reward` names beauty; the recipe's rewards are jpeg_size"):
        check_rows(recipe, [], [of_row(Overrides(reward=("jpeg_size", "beauty")))])
    watched = recipe_with(tmp_path, "rewards=[{type='jpeg_size'}, {type='brightness', weight=0.0}]")
    check_rows(watched, [], [of_row(Overrides(reward=("brightness",)))])
    with pytest.raises(PromptError, match=r"the rewards of this row \(brightness\) have weight 0"):
        check_rows(watched, [of_row(Overrides(reward=("brightness",)))], [])


def test_pictures_and_sound_are_refused_where_the_family_takes_none(tmp_path: Path) -> None:
    recipe = recipe_with(tmp_path)
    with pytest.raises(PromptError, match=r"^p\.jsonl:4: `image`: .*sd3 makes media from text alone"):
        check_prompts(recipe, [of_row(Overrides(), images=("a.png",))], [])
    with pytest.raises(PromptError, match=r"^p\.jsonl:4: `audio`: sd3 takes no sound"):
        check_prompts(recipe, [], [of_row(Overrides(), audio="a.wav")])


class OneEngine:
    """What the pool asks of the first engine, without HTTP."""

    def __init__(self) -> None:
        self.components = Worker(tiny_model()).components
        self.num_asked = 0

    async def check_prompts(self, prompts: Any, *, max_sequence_length: int) -> list[str]:
        return self.components.family.check_prompts(self.components, prompts, max_sequence_length=max_sequence_length)

    async def check_requests(self, requests: Any) -> list[str | None]:
        self.num_asked += len(requests)
        answers: list[str | None] = []
        for request in requests:
            try:
                resolve(request, self.components)
                answers.append(None)
            except RequestError as error:
                answers.append(str(error))
        return answers


async def ask(recipe: RlRecipe, engine: OneEngine, train: list[Prompt], heldout: list[Prompt]) -> None:
    await ask_engine(recipe, engine, train, heldout)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("recipe_size", "row", "error", "message"),
    [
        (64, Overrides(height=65), PromptError, r"^p\.jsonl:4: height = 65 is not a multiple of 16"),
        (64, Overrides(num_frames=5), PromptError, r"^p\.jsonl:4: num_frames = 5"),
        (65, Overrides(), ConfigError, r"\[sampling\] asks for what the model cannot make: height = 65"),
    ],
)
def test_sizes_are_checked_by_the_engine_once_for_each_kind_of_row(
    tmp_path: Path, recipe_size: int, row: Overrides, error: type[Exception], message: str
) -> None:
    recipe, engine = recipe_with(tmp_path, f"sampling.height={recipe_size}"), OneEngine()
    with pytest.raises(error, match=message):
        asyncio.run(ask(recipe, engine, [of_row(row)] * 3, [of_row(row)] * 3))
    assert engine.num_asked == 2


def test_pictures_of_unlike_sizes_make_one_white_padded_array() -> None:
    small, wide = np.zeros((2, 2, 3), np.uint8), np.ones((1, 3, 3), np.uint8)
    sheet = padded([small, wide])
    assert sheet.shape == (2, 2, 3, 3)
    assert (sheet[0, :, :2] == 0).all()
    assert (sheet[0, :, 2] == 255).all()
    assert (sheet[1, 0] == 1).all()
    assert (sheet[1, 1] == 255).all()
