"""Write data/glyphs/train.txt and heldout.txt: distinct four-digit strings, disjoint, in a fixed random order.

python scripts/make_glyph_prompts.py [FOLDER]
"""

from __future__ import annotations

import random
import sys
from pathlib import Path

NUM_TRAIN, NUM_HELDOUT, SEED = 4000, 256, 20260101


def main(folder: Path) -> None:
    strings = [f"{number:04d}" for number in range(10_000)]
    random.Random(SEED).shuffle(strings)
    folder.mkdir(parents=True, exist_ok=True)
    heldout, train = strings[:NUM_HELDOUT], strings[NUM_HELDOUT : NUM_HELDOUT + NUM_TRAIN]
    (folder / "heldout.txt").write_text("\n".join(heldout) + "\n")
    (folder / "train.txt").write_text("\n".join(train) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path("data/glyphs"))
