"""`verst recipes`: the recipes that come with verst, and one of them as it stands."""

from __future__ import annotations

import re
import sys
import tomllib
from dataclasses import asdict, dataclass
from pathlib import Path

from verst.cli.options import print_json
from verst.config.checks import did_you_mean
from verst.errors import ConfigError

FOLDER = Path(__file__).parents[1] / "recipes"
"""Of the repository by a link, and inside the package where verst was installed from a wheel."""


@dataclass(frozen=True, kw_only=True)
class ListedRecipe:
    name: str
    algorithm: str
    """Its type."""
    model: str
    """Name of the model folder, which says family and size."""
    what: str
    """First sentence of the file."""
    result: str
    """The other ones: what it needs, and what to expect of it or that it was not run."""


def run(name: str | None, *, as_json: bool) -> None:
    if name is not None:
        path = find(name)
        if as_json:
            print_json({**asdict(listed(path)), "text": path.read_text()})
        else:
            sys.stdout.write(path.read_text())
        return
    rows = [listed(path) for path in paths()]
    if as_json:
        print_json(rows)
    else:
        _print_table(rows)


def paths() -> list[Path]:
    return sorted(FOLDER.glob("*.toml"))


def find(name: str) -> Path:
    """The file of a recipe, with or without `.toml` behind its name. Raises ConfigError, naming the nearest."""
    known = {path.stem: path for path in paths()}
    stem = name.removesuffix(".toml")
    if stem not in known:
        raise ConfigError(f"no recipe is called {name!r}{did_you_mean(stem, list(known), 'verst recipes lists them')}")
    return known[stem]


def listed(path: Path) -> ListedRecipe:
    text = path.read_text()
    recipe = tomllib.loads(text)
    head = text.split("\n\n")[0].splitlines()
    told = " ".join(line.removeprefix("#").strip() for line in head if line.startswith("#"))
    what, _, result = re.sub(r"\.\s", ".\n", told, count=1).partition("\n")
    return ListedRecipe(
        name=path.stem,
        algorithm=recipe["algorithm"]["type"],
        model=Path(recipe["model"]["path"]).name,
        what=what,
        result=result,
    )


def _print_table(rows: list[ListedRecipe]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(highlight=False)
    if not console.is_terminal:
        # One recipe a line, for grep and cut.
        for row in rows:
            print(row.name, row.algorithm, row.model, row.result, sep="\t")
        return
    table = Table("recipe", "algorithm", "model", "needs, and what to expect", box=box.SIMPLE)
    for row in rows:
        table.add_row(Text(row.name, style="bold"), row.algorithm, Text(row.model), Text(row.result))
    console.print(table)
    console.print(
        "verst recipes NAME > mine.toml copies one; its files are looked for where the command runs.", markup=False
    )
