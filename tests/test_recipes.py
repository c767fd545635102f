"""`verst recipes`: what it lists and prints is what stands in recipes/."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from cli_fixtures import here

from verst.cli.recipes import FOLDER, listed

ROOT = Path(__file__).parents[1]
FILES = sorted((ROOT / "recipes").glob("*.toml"))


def test_every_recipe_is_listed_with_its_result(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert here(monkeypatch, "recipes") == 0
    lines = [line.split("\t") for line in capsys.readouterr().out.splitlines()]
    assert [line[0] for line in lines] == [path.stem for path in FILES]
    glyphs = next(line for line in lines if line[0] == "glyphs_mix")
    assert glyphs[1:] == [
        "flow_grpo",
        "glyphs",
        "Needs two CPU cores and 4 GiB. Expected: held-out reward 0.44 -> 0.89 after 120 iterations of 128 pictures (2026-11-30, seed 7).",
    ]
    assert all(len(line) == 4 and line[3].endswith(".") for line in lines)


def test_one_recipe_is_printed_as_it_stands(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = (ROOT / "recipes" / "flux1_dev_nft.toml").read_text()
    for name in ("flux1_dev_nft", "flux1_dev_nft.toml"):
        assert here(monkeypatch, "recipes", name) == 0
        assert capsys.readouterr().out == text


def test_scripts_get_json(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert here(monkeypatch, "recipes", "--json") == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["name"] for row in rows] == [path.stem for path in FILES]
    assert here(monkeypatch, "recipes", "glyphs_nft", "--json") == 0
    row = json.loads(capsys.readouterr().out)
    assert row.pop("text") == (ROOT / "recipes" / "glyphs_nft.toml").read_text()
    assert row in rows


def test_a_first_sentence_may_hold_dots(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(
        '# NFT on FLUX.1: a.\n# Needs 1.5 GiB. Done.\n\n[model]\npath = "a/b"\n\n[algorithm]\ntype = "nft"\n'
    )
    assert (listed(path).what, listed(path).result) == ("NFT on FLUX.1: a.", "Needs 1.5 GiB. Done.")


def test_a_wrong_name_is_one_paragraph_with_the_nearest(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert here(monkeypatch, "recipes", "flux1_dev_ntf") == 2
    assert capsys.readouterr().err == (
        "verst: ConfigError: no recipe is called 'flux1_dev_ntf': did you mean 'flux1_dev_nft'? verst recipes lists them\n"
    )


def test_recipes_stand_in_one_place() -> None:
    assert FOLDER.resolve() == (ROOT / "recipes").resolve()
