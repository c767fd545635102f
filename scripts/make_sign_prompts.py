"""Write data/prompts/signs_{train,heldout}.txt: prompts whose quoted text an OCR reward can look for.

python scripts/make_sign_prompts.py
"""

from __future__ import annotations

import random
from pathlib import Path

PLACES = (
    "A wooden sign on a beach that says",
    "A neon sign over a bar at night that reads",
    "A chalkboard in front of a café with the words",
    "A book cover on a desk with the title",
    "A train station board that shows",
    "A birthday cake with the icing text",
    "A red banner over a street that says",
    "A T-shirt on a hanger with the print",
    "A coffee mug on a table with the word",
    "A billboard beside a highway that reads",
)
FIRST = ("Open", "Welcome", "New", "Quiet", "Golden", "Blue", "Last", "Happy", "Fresh", "Little", "Grand", "Lucky")
SECOND = (
    "Harbor",
    "Garden",
    "Morning",
    "Market",
    "River",
    "Station",
    "Kitchen",
    "Summer",
    "Museum",
    "Valley",
    "Bakery",
)
NUM_HELDOUT = 64
NUM_TRAIN = 512


def main() -> None:
    texts = [f"{one} {two}" for one in FIRST for two in SECOND]
    prompts = [f'{place} "{text}".' for place in PLACES for text in texts]
    random.Random(0).shuffle(prompts)
    folder = Path(__file__).parents[1] / "data" / "prompts"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "signs_heldout.txt").write_text("\n".join(prompts[:NUM_HELDOUT]) + "\n")
    (folder / "signs_train.txt").write_text("\n".join(prompts[NUM_HELDOUT : NUM_HELDOUT + NUM_TRAIN]) + "\n")


if __name__ == "__main__":
    main()
