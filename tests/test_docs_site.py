"""The documentation site builds without a warning, offline, and nothing in it leads nowhere."""

from __future__ import annotations

import dataclasses
import importlib
import os
import re
import shutil
import subprocess
import sys
import tomllib
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest
from mkdocs.commands.build import build
from mkdocs.config import load_config

import verst
from verst import errors
from verst.config import RlRecipe, SftRecipe

ROOT = Path(__file__).parents[1]


class Links(HTMLParser):
    """What a page names: places to go to, files that it loads, and its own anchors."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.to: list[str] = []
        self.loaded: list[str] = []
        self.anchors: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        named = {key: value or "" for key, value in attrs}
        self.anchors.add(named.get("id", ""))
        if tag == "a" and "href" in named:
            self.to.append(named["href"])
        if tag == "link" and named.get("rel") in ("stylesheet", "icon", "preconnect"):
            self.loaded.append(named["href"])
        if tag in ("script", "img", "iframe") and "src" in named:
            self.loaded.append(named["src"])


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    build(load_config(str(ROOT / "mkdocs.yml"), site_dir=str(folder), strict=True))
    return folder


@pytest.fixture(scope="module")
def pages(site: Path) -> dict[Path, Links]:
    return {page: Links(page.read_text()) for page in site.rglob("*.html") if page.name != "404.html"}


def test_every_page_of_docs_is_there(site: Path) -> None:
    written = {page.with_suffix(".html").name for page in (ROOT / "docs").glob("*.md")}
    made = {"index.html", "architecture.html"}
    assert {page.name for page in site.glob("*.html")} == written | made | {"404.html"}
    assert {page.name for page in (site / "reference").iterdir()} == {
        "keys.html",
        "commands.html",
        "recipes.html",
        "python.html",
    }


def test_links_lead_somewhere(pages: dict[Path, Links]) -> None:
    broken, seen = [], 0
    for page, links in pages.items():
        for link in links.to + links.loaded:
            parts = urlsplit(link)
            if parts.scheme:
                continue
            target = (page.parent / unquote(parts.path)).resolve() if parts.path else page
            there = target.is_file() and (
                not parts.fragment or target not in pages or unquote(parts.fragment) in pages[target].anchors
            )
            seen += 1
            if not there:
                broken.append(f"{page.name}: {link}")
    assert (broken, seen > 1000) == ([], True)


def test_nothing_is_loaded_from_elsewhere(pages: dict[Path, Links]) -> None:
    loaded = {link for links in pages.values() for link in links.loaded}
    assert {link for link in loaded if urlsplit(link).scheme or link.startswith("//")} == set()
    assert any("stylesheets/" in link for link in loaded)


def test_keys_and_recipes_are_all_told(site: Path) -> None:
    keys = (site / "reference/keys.html").read_text()
    for recipe in (RlRecipe, SftRecipe):
        for name in recipe.model_fields:
            assert f"<code>{name}</code>" in keys
    assert "GRPO" in keys
    # A key within a variant within a table, with its bounds, default and docstring.
    row = "<td><code>rank</code></td>\n<td>whole number &gt; 0</td>\n<td>32</td>\n<td>Rank r of each A, B pair.</td>"
    assert row in keys
    recipes = (site / "reference/recipes.html").read_text()
    for path in (ROOT / "recipes").glob("*.toml"):
        assert f"verst train recipes/{path.name}" in recipes
        assert tomllib.loads(path.read_text())["algorithm"]["type"] in recipes


def test_the_python_api_is_all_told(site: Path, pages: dict[Path, Links]) -> None:
    path = site / "reference/python.html"
    page, anchors = path.read_text(), pages[path].anchors
    headings = set(re.findall(r'<h3 id="[\w.]+"><code>([\w.]+)</code>', page))
    assert {f"verst.{name}" for name in verst._MODULE_OF} - headings == set()
    for name, error in vars(errors).items():
        assert not isinstance(error, type) or f"<code>{name}(" in page
    # A default, a keyword, a type, a field with its docstring, and a method.
    plain = re.sub(r"<[^>]+>", "", page)
    assert "checkpoint: str | int = 'newest'" in plain
    field = "<li><strong><code>iterations</code></strong> <code>int</code>: Done and reported.</li>"
    assert field in page
    assert "microgroup(" in plain
    # Whatever record of ours a signature or a field of the page names is on the page.
    told = {anchor: _object(anchor) for anchor in anchors if anchor.startswith("verst.")}
    lacking = {
        f"{anchor}: {found.__qualname__}"
        for anchor, target in told.items()
        for found in _classes_in(target)
        if found not in told.values()
    }
    assert lacking == set()


def _object(anchor: str) -> Any:
    module, _, name = anchor.rpartition(".")
    return getattr(importlib.import_module(module), name)


def _classes_in(target: Any) -> set[type]:
    """Dataclasses and protocols of verst in the annotations of a function, or of the fields and methods of a class."""
    module = sys.modules[getattr(target, "__module__", "builtins")]
    members = [target, *vars(target).values()] if isinstance(target, type) else [target]
    members = [getattr(member, "fget", None) or getattr(member, "__func__", member) for member in members]
    words = {
        word
        for member in members
        for name, annotation in getattr(member, "__annotations__", {}).items()
        if not name.startswith("_")
        for word in re.findall(r"\w+", str(annotation))
    }
    found = {getattr(module, word, None) for word in words}
    return {
        kind
        for kind in found
        if isinstance(kind, type)
        and kind.__module__.startswith("verst.")
        and (dataclasses.is_dataclass(kind) or getattr(kind, "_is_protocol", False) or issubclass(kind, tuple))
    }


def test_make_docs_refuses_what_leads_nowhere(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "docs", tmp_path / "docs")
    for name in ("Makefile", "mkdocs.yml", "scripts", "recipes", "benchmarks", "README.md", "ARCHITECTURE.md"):
        (tmp_path / name).symlink_to(ROOT / name)
    for name in ("requirements.txt", "requirements-dev.txt", "pyproject.toml"):
        (tmp_path / name).touch()
    environment = tmp_path / ".venv"
    environment.mkdir()
    (environment / "bin").symlink_to(Path(sys.executable).parent)
    for name in (".runtime", ".dev"):
        (environment / name).touch()

    # Variables of a `make test` that runs this are not for this one.
    own = {key: value for key, value in os.environ.items() if not key.startswith(("MAKE", "MFLAGS"))}

    def make() -> subprocess.CompletedProcess[str]:
        return subprocess.run(["make", "docs"], cwd=tmp_path, env=own, capture_output=True, text=True)

    page = tmp_path / "docs" / "speed.md"
    text = page.read_text()
    page.write_text(f"{text}\n[no page](nowhere.md), [no heading](data.md#nowhere)\n")
    broken = make()
    assert broken.returncode != 0
    assert "'nowhere.md'" in broken.stderr
    assert "'#nowhere'" in broken.stderr
    page.write_text(text)
    assert make().returncode == 0
    assert (tmp_path / "build/docs/index.html").is_file()
