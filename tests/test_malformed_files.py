"""Recipes, checkpoints and prompt files that are wrong: the error that a person can act on, and never another one."""

from __future__ import annotations

import contextlib
import hashlib
import json
import shutil
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_checkpoint import loaded, saved

from verst.config.load import load_recipe, missing_files, parse_recipe
from verst.errors import CheckpointError, ConfigError, PromptError
from verst.rollout.prompts import read_prompts

RECIPE = tomllib.loads((Path(__file__).parents[1] / "recipes" / "glyphs_grpo.toml").read_text())
quick = settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=10)
values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3)
)


def leaves(table: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Keys that lead to each value."""
    items = table.items() if isinstance(table, dict) else enumerate(table) if isinstance(table, list) else ()
    found = False
    for key, value in items:
        found = True
        yield from leaves(value, (*path, key))
    if not found:
        yield path


LEAVES = [path for path in leaves(RECIPE) if path]


def changed(path: tuple[Any, ...], value: Any) -> dict[str, Any]:
    data: dict[str, Any] = json.loads(json.dumps(RECIPE))
    table: Any = data
    for key in path[:-1]:
        table = table[key]
    table[path[-1]] = value
    return data


def named(path: tuple[Any, ...]) -> str:
    return ".".join(str(key) for key in path)


@pytest.mark.parametrize("path", LEAVES, ids=named)
def test_a_recipe_with_a_value_of_another_kind(path: tuple[Any, ...]) -> None:
    assert len(LEAVES) > 25
    for value in ({"no_such_key": 1}, [[]], float("nan")):
        with pytest.raises(ConfigError) as caught:
            parse_recipe(changed(path, value))
        # The key, or the one above it where a table of another kind was meant.
        assert str(path[0]) in str(caught.value)
    slip = (*path[:-1], f"{path[-1]}_x") if isinstance(path[-1], str) else (*path[:-2], f"{path[-2]}_x")
    with pytest.raises(ConfigError, match=str(slip[-1])):
        parse_recipe(changed(slip, 1))


@quick
@given(path=st.sampled_from(LEAVES), value=values)
def test_a_recipe_with_any_value_is_a_recipe_or_a_config_error(path: tuple[Any, ...], value: Any) -> None:
    with contextlib.suppress(ConfigError):
        missing_files(parse_recipe(changed(path, value)))


@quick
@given(data=st.dictionaries(st.sampled_from([*RECIPE, "x", ""]), values, max_size=4))
def test_a_recipe_of_anything_is_a_config_error(data: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        parse_recipe(data)


@quick
@given(text=st.binary(max_size=80), override=st.text(max_size=20))
def test_a_recipe_file_of_any_bytes(tmp_path: Path, text: bytes, override: str) -> None:
    recipe = tmp_path / "r.toml"
    recipe.write_bytes(text)
    with pytest.raises(ConfigError):
        load_recipe(recipe)
    recipe.write_text((Path(__file__).parents[1] / "recipes" / "glyphs_grpo.toml").read_text())
    with contextlib.suppress(ConfigError):
        load_recipe(recipe, [override])


MANIFESTS: dict[str, Any] = {
    "nothing": b"",
    "no utf-8": b"\xff\xfe",
    "half": b'{"files": {',
    "deep": b"[" * 100_000,
    "a list": [],
    "a number": 7,
    "null": None,
    "no files": {},
    "files of another kind": {"files": ["run_state.json"]},
    "files that are null": {"files": None},
    "an entry of another kind": {"files": {"run_state.json": 1}},
    "an entry that says nothing": {"files": {"run_state.json": {}}},
    "a size of another kind": {"files": {"run_state.json": {"bytes": "x", "sha256": ""}}},
    "a file that is not there": {"files": {"absent": {"bytes": 1, "sha256": ""}}},
    "a folder": {"files": {"tensors": {"bytes": 1, "sha256": ""}}},
    "a file elsewhere": {"files": {"../outside": {"bytes": 1, "sha256": ""}}},
    "a file of the machine": {"files": {"/etc/passwd": {"bytes": 1, "sha256": ""}}},
    "a name that is none": {"files": {"\0": {"bytes": 1, "sha256": ""}}},
}


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(tmp_path_factory.mktemp("checkpoints"), 1)


def damaged(good: Path, root: Path) -> Path:
    return Path(shutil.copytree(good, root / good.name))


@pytest.mark.parametrize("kind", MANIFESTS)
@pytest.mark.parametrize("name", ["manifest.json", "run_state.json"])
def test_a_checkpoint_that_says_something_else_of_itself(good: Path, tmp_path: Path, name: str, kind: str) -> None:
    folder = damaged(good, tmp_path)
    said = MANIFESTS[kind]
    (folder / name).write_bytes(said if isinstance(said, bytes) else json.dumps(said).encode())
    with pytest.raises(CheckpointError, match="step_00000001"):
        loaded(folder)


@pytest.mark.parametrize("said", [[], 7, None, "state"], ids=str)
def test_a_state_that_is_whole_and_no_state(good: Path, tmp_path: Path, said: Any) -> None:
    """As written by another program: the checksums are right."""
    folder = damaged(good, tmp_path)
    (folder / "run_state.json").write_text(json.dumps(said))
    _sign(folder)
    with pytest.raises(CheckpointError, match=r"run_state\.json"):
        loaded(folder)


def _sign(folder: Path) -> None:
    """A manifest for the files as they are now."""
    files = {
        str(path.relative_to(folder)): {
            "bytes": path.stat().st_size,
            "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
        }
        for path in folder.rglob("*")
        if path.is_file() and path.name != "manifest.json"
    }
    (folder / "manifest.json").write_text(json.dumps({"iteration": 1, "files": files}))


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(at=st.integers(0, 10_000), byte=st.integers(0, 255), cut=st.booleans())
def test_a_manifest_with_a_byte_of_another_is_an_error_or_the_same(
    good: Path, tmp_path_factory: pytest.TempPathFactory, at: int, byte: int, cut: bool
) -> None:
    folder = damaged(good, tmp_path_factory.mktemp("flipped"))
    data = bytearray((folder / "manifest.json").read_bytes())
    at %= len(data)
    data[at] = byte
    (folder / "manifest.json").write_bytes(bytes(data[:at] if cut else data))
    with contextlib.suppress(CheckpointError):
        loaded(folder)


ROWS: dict[str, tuple[str, bytes]] = {
    "empty": ("p.txt", b""),
    "no text": ("p.txt", b" \n\t\n"),
    "latin": ("p.txt", b"caf\xe9"),
    "utf-16": ("p.txt", "a cat".encode("utf-16")),
    "picture": ("p.txt", b"\x89PNG\r\n\x1a\n\x00"),
    "half a line": ("p.jsonl", b'{"prompt": "a'),
    "a list": ("p.jsonl", b'["a"]'),
    "null": ("p.jsonl", b"null"),
    "another column": ("p.jsonl", b'{"promt": "a"}'),
    "a number": ("p.jsonl", b'{"prompt": 1}'),
    "deep": ("p.jsonl", b'{"prompt": ' + b"[" * 100_000),
    "infinite": ("p.jsonl", b'{"prompt": "a", "height": Infinity}'),
    "twice": ("p.jsonl", b'{"prompt": "a", "prompt": 2}'),
    "negative": ("p.jsonl", b'{"prompt": "a", "height": -1}'),
    "huge": ("p.jsonl", b'{"prompt": "a", "height": 1' + b"0" * 5000 + b"}"),
    "a seed too far": ("p.jsonl", b'{"prompt": "a", "seed": 9223372036854775808}'),
    "no picture there": ("p.jsonl", b'{"prompt": "a", "image": "absent.png"}'),
    "a folder for a picture": ("p.jsonl", b'{"prompt": "a", "image": "."}'),
    "a name that is none": ("p.jsonl", b'{"prompt": "a", "image": "\\u0000"}'),
    "pictures of numbers": ("p.jsonl", b'{"prompt": "a", "image": [1]}'),
    "a slip": ("p.jsonl", b'{"prompt": "a", "hieght": 64}'),
    "what a row cannot set": ("p.jsonl", b'{"prompt": "a", "guidance_scale": 2}'),
    "a surrogate": ("p.jsonl", b'{"prompt": "\\ud800"}'),
    "no header": ("p.csv", b"a cat\na dog\n"),
    "too many cells": ("p.csv", b"prompt\na,b\n"),
    "a quote without end": ("p.csv", b'prompt\n"a\n'),
    "a long cell": ("p.csv", b"prompt,x\na," + b"x" * 200_000),
    "no parquet": ("p.parquet", b"PAR1 and nothing"),
    "another kind": ("p.xlsx", b"a"),
}


@pytest.mark.parametrize("kind", ROWS)
def test_prompt_files_that_are_none(tmp_path: Path, kind: str) -> None:
    name, content = ROWS[kind]
    (tmp_path / name).write_bytes(content)
    with pytest.raises(PromptError, match=name.replace(".", r"\.")):
        read_prompts(tmp_path / name)


MAKERS: dict[str, Callable[[Any], bytes]] = {
    "p.jsonl": lambda row: json.dumps(row).encode(),
    "p.csv": lambda row: ("prompt,height\n" + ",".join(map(str, row))).encode("utf-8", "surrogatepass"),
}


@quick
@given(
    raw=st.binary(max_size=60),
    row=st.dictionaries(st.sampled_from(["prompt", "height", "seed", "image", "reward", "x"]), values, max_size=4),
    cells=st.lists(st.text(max_size=8), max_size=3),
)
def test_any_prompt_file_is_read_or_a_prompt_error(
    tmp_path: Path, raw: bytes, row: dict[str, Any], cells: list[str]
) -> None:
    contents = [(name, raw) for name in ("p.txt", "p.jsonl", "p.csv", "p.parquet")]
    contents += [("p.jsonl", MAKERS["p.jsonl"](row)), ("p.csv", MAKERS["p.csv"](cells))]
    for name, content in contents:
        (tmp_path / name).write_bytes(content)
        with contextlib.suppress(PromptError):
            assert read_prompts(tmp_path / name)
