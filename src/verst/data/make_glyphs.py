"""Small data that verst draws itself: lines of digits with captions, and pairs of which one is spoilt.

The same bytes on any machine: fonts and places follow from fixed seeds, and the fonts come with matplotlib.
"""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Sequence
from pathlib import Path

from PIL import Image, ImageFilter

from verst.data.text_lines import TextLines

_FONTS = ("DejaVuSans.ttf", "DejaVuSans-Bold.ttf", "DejaVuSerif.ttf", "DejaVuSansMono.ttf")
_HEIGHT, _WIDTH = 32, 64


def make_glyphs(folder: Path, texts: Sequence[str]) -> None:
    """A folder of one picture a text with x.txt beside x.png; it appears whole, by one rename."""
    partial, rng = _partial(folder), random.Random("verst glyphs")
    lines = TextLines([], _FONTS, height=_HEIGHT, width=_WIDTH)
    for number, text in enumerate(texts):
        Image.fromarray(lines.draw(text, rng)).save(partial / f"{number:04d}.png")
        (partial / f"{number:04d}.txt").write_text(text + "\n")
    partial.rename(folder)


def make_glyph_pairs(table: Path, texts: Sequence[str]) -> None:
    """`table` (.jsonl) and a folder of its name: of each text a readable picture and a spoilt one.

    Half of the spoilt ones show two other digits, half are blurred.
    """
    folder = table.with_suffix("")
    partial, rng = _partial(folder), random.Random("verst glyph pairs")
    lines, rows = TextLines([], _FONTS, height=_HEIGHT, width=_WIDTH), []
    for number, text in enumerate(texts):
        good = Image.fromarray(lines.draw(text, rng))
        if number % 2:
            bad = Image.fromarray(lines.draw(_other_digits(text, rng), rng))
        else:
            bad = Image.fromarray(lines.draw(text, rng)).filter(ImageFilter.GaussianBlur(rng.uniform(1.5, 3.0)))
        names = {"chosen": f"{number:04d}_chosen.png", "rejected": f"{number:04d}_rejected.png"}
        good.save(partial / names["chosen"])
        bad.save(partial / names["rejected"])
        rows.append({"prompt": text, **{key: f"{folder.name}/{name}" for key, name in names.items()}})
    if folder.exists():
        shutil.rmtree(folder)
    partial.rename(folder)
    # The table last: it is what says that the data are there.
    beside = table.with_name(f".partial_{table.name}")
    beside.write_text("".join(json.dumps(row) + "\n" for row in rows))
    beside.rename(table)


def _partial(folder: Path) -> Path:
    partial = folder.with_name(f".partial_{folder.name}")
    if partial.exists():
        shutil.rmtree(partial)
    partial.mkdir(parents=True)
    return partial


def _other_digits(text: str, rng: random.Random) -> str:
    """Two of the digits are others."""
    changed = list(text)
    for place in rng.sample(range(len(text)), 2):
        changed[place] = str((int(text[place]) + rng.randrange(1, 10)) % 10)
    return "".join(changed)
