"""A person at the dashboard: headless Chromium on the served page and on an exported one.

Screenshots, and how many frames a second the timeline drew, are left in build/dashboard/.
"""

from __future__ import annotations

import importlib.resources
import json
import os
import re
import runpy
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from dashboard_fixtures import WrittenRun
from PIL import Image
from playwright.sync_api import Browser, Locator, Page, expect, sync_playwright

ROOT = Path(__file__).parents[1]
OUT = ROOT / "build" / "dashboard"
VIEWS = ("curves", "heldout", "extremes", "timeline", "system", "alarms", "recipe")
FRAMES = 60
PATIENCE_MS = 60_000
"""For what comes at once on an idle machine."""
AXE = importlib.resources.files("axe_playwright_python").joinpath("axe.min.js").read_text(encoding="utf-8")

expect.set_options(timeout=PATIENCE_MS)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    program = runpy.run_path(str(ROOT / "scripts" / "browser.py"))["find"]()
    assert program is not None, "there is no Chromium here: run `python scripts/browser.py`, as `make test` does"
    OUT.mkdir(parents=True, exist_ok=True)
    arguments = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--disable-component-update", "--disable-sync"]
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=str(program), args=arguments)
        yield chromium
        chromium.close()


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, WrittenRun]]:
    """Two runs that go on: one of pictures, one of clips with sound."""
    folder = tmp_path_factory.mktemp("runs")
    written = {name: WrittenRun(folder / name, seed=seed) for seed, name in enumerate(("clips", "pictures"))}
    for _ in range(4):
        written["pictures"].iterate()
        written["clips"].iterate(clip=True)
    written["clips"].alarm("the reward fell")
    yield written
    for run in written.values():
        run.close()


@contextmanager
def serving(folder: Path) -> Iterator[str]:
    """The command as a person gives it; it ends, without an error, on Ctrl-C."""
    command = [sys.executable, "-m", "verst.cli.main", "dashboard", str(folder), "--port", "0"]
    environment = {key: value for key, value in os.environ.items() if key != "VERST_TOKEN"}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    ) as server:
        try:
            assert server.stdout is not None
            line = server.stdout.readline()
            match = re.search(r"http://\S+", line)
            assert match is not None, line + server.communicate()[1]
            yield match[0]
        finally:
            server.send_signal(signal.SIGINT)
            _, errors = server.communicate(timeout=60)
        assert (server.returncode, errors) == (0, "")


@pytest.fixture(scope="module")
def url(runs: dict[str, WrittenRun]) -> Iterator[str]:
    with serving(runs["clips"].path.parent) as address:
        yield address


@pytest.fixture
def page(browser: Browser) -> Iterator[Page]:
    with watched(browser) as one:
        yield one


@contextmanager
def watched(browser: Browser, **known: Any) -> Iterator[Page]:
    """Whatever the page says on its console as an error, or throws, fails the test."""
    context = browser.new_context(viewport={"width": 1280, "height": 900}, **known)
    page, errors = context.new_page(), list[str]()
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("console", lambda said: errors.append(said.text) if said.type == "error" else None)
    yield page
    context.close()
    assert errors == []


def chip(page: Page, name: str) -> Locator:
    return page.locator("#runs .chip").filter(has=page.get_by_text(name, exact=True))


def shoot(page: Page, name: str) -> None:
    page.screenshot(path=OUT / f"{name}.png")


def test_a_new_point_arrives_while_the_run_goes_on(page, url, runs):
    page.goto(url)
    run = runs["pictures"]
    expect(chip(page, "pictures")).to_contain_text(f"{run.iteration} of 100")
    chart = page.locator(".card").filter(has=page.get_by_role("heading", name="Reward ocr")).locator("svg[role=img]")
    for _ in range(2):
        run.iterate()
        expect(chip(page, "pictures")).to_contain_text(f"{run.iteration} of 100")
        value = f"{0.3 + 0.01 * run.iteration:.2f}"
        expect(chart).to_have_attribute("aria-label", re.compile(rf"pictures, training from 0\.3 to {value} at"))
    page.locator(".chart").first.hover(position={"x": 300, "y": 90})
    expect(page.locator(".tip").first).to_contain_text("iteration")
    page.get_by_label("Find a metric").fill("ratio")
    expect(page.locator(".card")).to_have_count(1)
    page.get_by_text("Numbers").click()
    expect(page.locator("tbody tr")).to_have_count(run.iteration + 1)
    shoot(page, "curves")


LIVE = [
    *("run.name=live", "run.iterations=3", "run.threads=1", "rollout.num_groups=2", "rollout.group_size=8"),
    *("rollout.microgroup_size=8", "trainer.tile_size=8", "eval.num_prompts=4", "eval.batch_size=4", "eval.grid=4"),
    *("eval.every=2", "checkpoint.every=3", "cluster.num_cpus=2"),
]


@pytest.mark.ray
def test_a_glyph_run_is_looked_at_while_it_trains(browser, tmp_path):
    """The real thing: a training run, the page beside it, a point that was not there, and the pictures of the docs of it."""
    command = [
        sys.executable,
        "-m",
        "verst.cli.main",
        "train",
        "recipes/glyphs_grpo.toml",
        *LIVE,
        f"run.folder={tmp_path}",
    ]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "RAY_ADDRESS": "127.0.0.1:9"}
    log = tmp_path / "train.log"
    with log.open("w") as said:
        training = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=said, stderr=said)
    try:
        until = time.monotonic() + 300  # a start that hangs is a failure, and not a test without an end
        while not (tmp_path / "live" / "metrics.jsonl").exists() and training.poll() is None:
            assert time.monotonic() < until, log.read_text()
            time.sleep(0.1)
        with serving(tmp_path) as url, watched(browser) as page:
            page.goto(url)
            live = chip(page, "live")
            expect(live).to_contain_text(re.compile(r"[0-2] of 3"))
            chart = page.locator(".card").filter(has=page.get_by_role("heading", name="Reward ocr"))
            drawn = chart.locator("svg[role=img]").get_attribute("aria-label")
            assert training.poll() is None, log.read_text()
            expect(chart.locator("svg[role=img]")).not_to_have_attribute("aria-label", drawn)
            expect(live).to_contain_text("3 of 3, finished")
            shoot(page, "live")
        assert training.wait(timeout=60) == 0, log.read_text()
    finally:
        training.terminate()
        training.wait(timeout=60)
    script = runpy.run_path(str(ROOT / "scripts" / "docs_pictures.py"))
    pictures = script["make_pictures"](tmp_path / "live", tmp_path / "pictures", browser)
    assert {path.name for path in pictures} == {path.name for path in (ROOT / "docs" / "images").iterdir()} - {
        "learning.png"
    }
    for path in pictures:
        with Image.open(path) as picture:
            assert len(set(picture.convert("L").getdata())) > 8  # something is drawn
        assert path.stat().st_size < 150_000


def test_a_clip_with_sound_plays(page, url, runs):
    page.goto(f"{url}#heldout")
    page.locator(".side").first.locator(".shot").nth(1).click()
    dialog = page.get_by_role("dialog")
    expect(dialog).to_contain_text("a 7 1")
    video = dialog.locator("video")
    page.wait_for_function("() => document.querySelector('dialog video').readyState >= 2", timeout=PATIENCE_MS)
    video.evaluate("video => { video.muted = true; return video.play(); }")
    page.wait_for_function("() => document.querySelector('dialog video').currentTime > 0.2", timeout=PATIENCE_MS)
    assert video.evaluate("video => [video.videoWidth, video.videoHeight, video.error]") == [48, 32, None]
    sound = dialog.locator("audio").evaluate(
        "sound => new Promise(done => { sound.onloadedmetadata = () => done(sound.duration); sound.load(); })"
    )
    assert sound == pytest.approx(1.5, abs=0.15)
    before = video.bounding_box()
    dialog.get_by_label("Zoom out").click()
    after = dialog.locator("video").bounding_box()
    assert after["width"] == pytest.approx(before["width"] / 2, abs=2)
    expect(dialog.locator(".strip button")).to_have_count(2)
    dialog.locator(".strip button").first.click()
    expect(dialog).to_contain_text("iteration 0")
    shoot(page, "clip")
    page.keyboard.press("Escape")
    expect(dialog).to_be_hidden()


def test_the_slider_goes_through_the_evaluations(page, url):
    page.goto(f"{url}#heldout")
    picture = page.locator(".side").last.locator(".shot img").first
    newest = picture.get_attribute("src")
    slider = page.get_by_label("Iteration")
    slider.focus()
    page.keyboard.press("Home")
    expect(page.locator("output")).to_have_text("iteration 0")
    expect(picture).not_to_have_attribute("src", newest)
    page.goto(f"{url}#extremes")
    expect(page.locator(".side").last.locator(".groups > li")).to_have_count(3)
    expect(page.locator(".groups").first).to_contain_text("4 samples: mean")
    page.locator(".side").last.locator(".shot").nth(1).click()
    expect(page.get_by_role("dialog")).to_contain_text("worst")
    shoot(page, "extremes")


def test_two_runs_side_by_side(page, url):
    page.goto(f"{url}#recipe")
    expect(page.get_by_role("status").last).to_have_text("2 of 5 keys differ")
    page.get_by_label("Only differences").check()
    rows = page.locator("section").first.locator("tbody tr")
    expect(rows).to_have_count(2)
    expect(rows.last).to_contain_text("run.seed")
    shoot(page, "recipe")
    chip(page, "clips").locator("input").uncheck()
    expect(page.get_by_role("status").last).to_have_text("5 keys")
    page.get_by_role("link", name="Alarms").click()
    expect(page.locator("main")).to_contain_text("None was raised")
    chip(page, "clips").locator("input").check()
    expect(page.locator("tbody tr")).to_have_count(1)
    expect(page.locator("tbody tr")).to_contain_text("the reward fell")
    page.get_by_role("link", name="Machines").click()
    expect(page.locator("main")).to_contain_text("pictures 12.3 GB")


def test_ten_thousand_microgroups_on_one_axis(browser, tmp_path):
    run = WrittenRun(tmp_path / "long")
    run.iterate()
    run.microgroups(10_000)
    run.close()
    with serving(tmp_path) as url, watched(browser) as page:
        page.goto(f"{url}#timeline")
        note = page.get_by_text(re.compile(r"10012 microgroups, \d+ spans\.$"))
        expect(note).to_be_visible()
        status = page.locator("#window")
        expect(status).to_contain_text("2.1 min wide")
        page.get_by_role("button", name=re.compile("A row for each microgroup")).click()
        canvas = page.locator("canvas")
        scrolled = page.evaluate(_FRAMES_OF, {"frames": FRAMES, "deltaY": 1600, "ctrlKey": False})
        assert canvas.evaluate(_DRAWN) > 0.005  # lanes, and the last of the rows
        shoot(page, "rows")
        zoomed = page.evaluate(_FRAMES_OF, {"frames": FRAMES, "deltaY": -20, "ctrlKey": True})
        assert len(scrolled) == len(zoomed) == FRAMES
        frames = {"scrolling": _per_second(scrolled), "zooming": _per_second(zoomed), "microgroups": 10_012}
        (OUT / "frames.json").write_text(json.dumps(frames, indent=1))
        shoot(page, "timeline")
        canvas.focus()
        page.keyboard.press("0")
        expect(status).to_contain_text("2.1 min wide")
        for _ in range(28):
            page.keyboard.press("+")
        expect(status).to_contain_text(re.compile(r", 1 µs wide"))
        page.get_by_role("button", name="Last iteration").click()
        expect(status).to_contain_text(re.compile(r", 900 ms wide"))
        assert canvas.evaluate(_DRAWN) > 0.05
        page.get_by_text("Lanes in numbers").click()
        expect(page.locator("tbody tr")).to_have_count(5)
        expect(page.locator("tbody")).to_contain_text("engine:0")
        shoot(page, "iteration")


_FRAMES_OF = """async ({frames, ...wheel}) => {
  const canvas = document.querySelector("canvas");
  const box = canvas.getBoundingClientRect();
  const event = {clientX: box.left + box.width / 2, clientY: box.top + box.height / 2, bubbles: true, cancelable: true};
  const times = [];
  for (let i = 0; i < frames; i++) {
    canvas.dispatchEvent(new WheelEvent("wheel", {...event, ...wheel}));
    times.push(await new Promise(requestAnimationFrame));
  }
  return times;
}"""
_DRAWN = """canvas => {
  const {data} = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
  const pixels = new Uint32Array(data.buffer);
  const counts = new Map();
  for (const pixel of pixels) counts.set(pixel, (counts.get(pixel) ?? 0) + 1);
  return 1 - Math.max(...counts.values()) / pixels.length;
}"""
"""The share of pixels that are not background."""


def _per_second(times: list[float]) -> float:
    return round(1000 * (len(times) - 1) / (times[-1] - times[0]), 1)


def test_the_exported_page_needs_nothing_but_itself(browser, runs, tmp_path):
    page_file = tmp_path / "runs.html"
    folders = [str(run.path) for run in runs.values()]
    command = [sys.executable, "-m", "verst.cli.main", "dashboard", *folders, "--export", str(page_file)]
    subprocess.run(command, check=True, capture_output=True)
    asked = []
    with watched(browser, offline=True) as page:
        page.on("request", lambda request: asked.append(request.url))
        page.goto(page_file.as_uri())
        expect(chip(page, "pictures")).to_contain_text("of 100")
        expect(page.locator("#connection")).to_contain_text("as of 20")
        expect(page.locator("svg[role=img]").first).to_have_attribute("aria-label", re.compile("training from 0.3 to"))
        page.goto(f"{page_file.as_uri()}#heldout")
        page.locator(".side").first.locator(".shot").first.click()
        page.wait_for_function("() => document.querySelector('dialog video').readyState >= 2", timeout=PATIENCE_MS)
        shoot(page, "exported")
        page.keyboard.press("Escape")
        page.goto(f"{page_file.as_uri()}#timeline")
        expect(page.get_by_text(re.compile(r"\d+ microgroups, \d+ spans")).first).to_be_visible()
    assert {url.partition(":")[0] for url in asked} <= {"file", "data", "blob"}


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_nothing_serious_stands_in_the_way_of_anybody(browser, url, scheme):
    with watched(browser, color_scheme=scheme) as page:
        found = []
        for view in VIEWS:
            page.goto(f"{url}#{view}")
            expect(chip(page, "pictures")).to_contain_text("of 100")
            expect(page.locator("main > div")).not_to_be_empty()
            found += serious(page, view)
        page.goto(f"{url}#heldout")
        page.locator(".shot").first.click()
        expect(page.get_by_role("dialog")).to_contain_text("seed")
        found += serious(page, "dialog")
        shoot(page, f"dialog-{scheme}")
    assert found == []


def serious(page: Page, where: str) -> list[str]:
    """What axe finds of the two upper grades."""
    page.evaluate(AXE)
    result = page.evaluate("async () => axe.run()")
    assert "color-contrast" in {rule["id"] for rule in result["passes"]}, f"{where}: axe has looked at no text"
    return [
        f"{where}: {finding['id']}: {finding['help']}: {[node['html'][:160] for node in finding['nodes'][:3]]}"
        for finding in result["violations"]
        if finding["impact"] in ("serious", "critical")
    ]
