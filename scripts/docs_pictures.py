"""The pictures of the documentation, from the folder of a finished run: python scripts/docs_pictures.py runs/glyphs_grpo

Writes into docs/images what the run has drawn itself (held-out samples before and after, the reward over iterations) and
the dashboard's page of it in a headless Chromium (scripts/browser.py).
"""

from __future__ import annotations

import argparse
import runpy
import shutil
import sys
import tempfile
from pathlib import Path

from PIL import Image
from playwright.sync_api import Browser, expect, sync_playwright

import verst

ROOT = Path(__file__).parents[1]
OWN = ("before_after.png", "reward_curve.png")
"""Of the run folder."""
WIDTH = 1280
VIEWS = {
    "dashboard": ("curves", "light", 820),
    "heldout": ("heldout", "light", 640),
    "timeline": ("timeline", "dark", 670),
}
"""Picture -> view of the page, colours, height in pixels."""
COLORS = 256


def make_pictures(run: Path, out: Path, browser: Browser) -> list[Path]:
    """The files. Raises OSError where the run has not been finished."""
    out.mkdir(parents=True, exist_ok=True)
    pictures = [Path(shutil.copyfile(run / name, out / name)) for name in OWN]
    with tempfile.TemporaryDirectory() as scratch:
        page = verst.write_page(run, Path(scratch) / "run.html")
        pictures += [_shoot(browser, page, out / f"{name}.png", *view) for name, view in VIEWS.items()]
    return pictures


def _shoot(browser: Browser, file: Path, out: Path, view: str, scheme: str, height: int) -> Path:
    context = browser.new_context(viewport={"width": WIDTH, "height": height}, color_scheme=scheme)
    page = context.new_page()
    page.goto(f"{file.as_uri()}#{view}")
    expect(page.locator("#runs .chip").first).to_contain_text("finished")
    expect(page.locator("main > div")).not_to_be_empty()
    if view == "timeline":
        page.get_by_role("button", name="Last iteration").click()
        expect(page.locator("#window")).to_contain_text("wide")
    if view == "heldout":
        page.wait_for_function("() => [...document.querySelectorAll('.shot img')].every(image => image.complete)")
    page.screenshot(path=out)
    context.close()
    # Flat colours: a third of the bytes, and nothing is seen of it.
    with Image.open(out) as shot:
        small = shot.convert("RGB").quantize(COLORS, dither=Image.Dither.NONE)
    small.save(out, optimize=True)
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("run", type=Path)
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "images")
    asked = parser.parse_args()
    program = runpy.run_path(str(ROOT / "scripts" / "browser.py"))["find"]()
    if program is None:
        sys.exit("there is no Chromium here: run `python scripts/browser.py`")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=str(program), args=["--no-sandbox", "--disable-gpu"])
        for picture in make_pictures(asked.run, asked.out, browser):
            print(f"{picture}: {picture.stat().st_size / 1024:.0f} KB")
        browser.close()


if __name__ == "__main__":
    main()
