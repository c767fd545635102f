"""A hub id instead of a folder: found in the local cache, or refused with the reason."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import huggingface_hub
import pytest
from cli_fixtures import here
from run_fixtures import tiny_model, write_recipe

from verst.errors import ModelError
from verst.families import recognise
from verst.families.hub import local_folder


def test_a_folder_is_itself(tmp_path: Path) -> None:
    assert local_folder(tmp_path) == tmp_path
    assert local_folder(Path("no/such/deep/folder")) == Path("no/such/deep/folder")


def test_a_cached_model_is_found_by_its_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    entry = tmp_path / "models--someone--tiny"
    snapshot = entry / "snapshots" / "0123456789012345678901234567890123456789"
    snapshot.parent.mkdir(parents=True)
    snapshot.symlink_to(tiny_model())
    (entry / "refs").mkdir()
    (entry / "refs" / "main").write_text(snapshot.name)
    monkeypatch.setattr("verst.families.hub.snapshot_download", _cached(tmp_path))
    assert recognise(local_folder(Path("someone/tiny"))).name == "sd3"


def test_eval_of_a_recipe_looks_for_its_model_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("verst.families.hub.snapshot_download", _cached(tmp_path))
    recipe = write_recipe(tmp_path)
    assert here(monkeypatch, "eval", recipe, "model.path=someone/absent") == 2
    assert "someone/absent is no folder here, and as a model of the hub" in capsys.readouterr().err
    assert here(monkeypatch, "eval", recipe, "prompts.heldout=none.txt") == 2
    assert "prompts.heldout = 'none.txt' does not exist" in capsys.readouterr().err


def _cached(folder: Path) -> Callable[..., str]:
    """The real download, on a cache of the test's own."""
    return functools.partial(huggingface_hub.snapshot_download, cache_dir=folder, local_files_only=True)


def test_what_cannot_be_had_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("verst.families.hub.snapshot_download", _cached(tmp_path))
    with pytest.raises(ModelError, match="someone/absent is no folder here, and as a model of the hub"):
        local_folder(Path("someone/absent"))
