"""What the dashboard makes of run folders: tails, spans in a window, the stream, files, access, the single file."""

from __future__ import annotations

import asyncio
import json
import re
import socket
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from dashboard_fixtures import WrittenRun
from loop_fixtures import on_a_loop

from verst.cli.main import app
from verst.dashboard.export import export, spread_order
from verst.dashboard.groups import GroupStore
from verst.dashboard.page import STATIC, live_page
from verst.dashboard.run import MAX_ROWS, RunView, Seen, find_runs, thinned
from verst.dashboard.server import Runs, make_app
from verst.dashboard.spans import NONE, SpanStore
from verst.dashboard.tail import Tail
from verst.errors import ConfigError
from verst.obs.events import EventLog
from verst.obs.metrics import MetricsLog

TOKEN = "a-token-that-nobody-guesses"


@pytest.fixture
def written(tmp_path: Path) -> Iterator[WrittenRun]:
    run = WrittenRun(tmp_path / "one")
    for _ in range(3):
        run.iterate()
    yield run
    run.close()


def client(run: WrittenRun, token: str | None = None) -> httpx.AsyncClient:
    transport = httpx.ASGITransport(make_app(Runs([run.path]), token=token))
    return httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1")


# --- files that grow


def test_a_tail_gives_each_whole_line_once(tmp_path):
    path, tail = tmp_path / "x.jsonl", Tail(tmp_path / "x.jsonl")
    assert tail.read() == ([], False)
    path.write_text('{"a": 1}\n{"a": 2}\n{"a"')
    assert tail.read() == ([{"a": 1}, {"a": 2}], False)
    with path.open("a") as file:
        file.write(': 3}\nnot json\n[1]\n{"a": NaN}\n')
    assert tail.read() == ([{"a": 3}, {"a": None}], False)
    assert tail.read() == ([], False)
    assert tail.num_damaged == 2
    tail.close()


def everything(tail: Tail) -> list[dict[str, Any]]:
    rows, void = tail.read()
    while tail.behind:
        more, again = tail.read()
        rows, void = rows + more, void or again
    assert not void
    return rows


@pytest.mark.parametrize("piece", [10, 64, 10**6])
def test_a_tail_goes_on_over_rotations(tmp_path, monkeypatch, piece):
    monkeypatch.setattr("verst.dashboard.tail.PIECE_BYTES", piece)
    log, tail, seen = EventLog(tmp_path / "spans.jsonl", max_bytes=300), Tail(tmp_path / "spans.jsonl"), []
    for i in range(40):
        log.event("x", number=i)
        if i % 3 == 0:
            seen += everything(tail)
    seen += everything(tail)
    assert [row["number"] for row in seen] == list(range(40))
    late = Tail(tmp_path / "spans.jsonl")
    kept = [row["number"] for row in everything(late)] + [row["number"] for row in everything(late)]
    assert 5 < len(kept) < 40
    assert kept == list(range(40 - len(kept), 40))
    for one in (log, tail, late):
        one.close()


def test_a_tail_that_missed_a_whole_file_begins_anew(tmp_path):
    log, tail = EventLog(tmp_path / "spans.jsonl", max_bytes=300), Tail(tmp_path / "spans.jsonl")
    log.event("x", number=0)
    assert [row["number"] for row in everything(tail)] == [0]
    for i in range(1, 40):
        log.event("x", number=i)
    rows, void = tail.read()
    rows += everything(tail)
    assert void
    assert [row["number"] for row in rows] == list(range(40 - len(rows), 40))
    log.close()
    tail.close()


def test_a_port_that_is_taken_is_said(written):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"--port = {port} is in use on 127.0.0.1: choose another --port, or 0"):
            app(["dashboard", str(written.path), "--port", str(port)], standalone_mode=False)


def test_a_file_that_is_written_anew_makes_what_was_read_void(tmp_path):
    path = tmp_path / "metrics.jsonl"
    log, tail = MetricsLog(path), Tail(path)
    for i in range(5):
        log.append(i, {"x": 1.0 * i})
    assert len(tail.read()[0]) == 5
    log.truncate_after(2)
    log.append(3, {"x": 33.0})
    rows, void = tail.read()
    assert void
    assert [row["iteration"] for row in rows] == [0, 1, 2, 3]
    assert rows[-1]["x"] == 33.0
    log.close()
    tail.close()


# --- a run


def test_news_come_once_and_all_again_after_a_resume(written):
    view, seen = RunView(written.path, name="one", number=4), Seen()
    view.refresh()
    first = view.news(seen)
    assert first["run"] == 4
    assert [row["iteration"] for row in first["metrics"]] == [0, 1, 2]
    assert first["facts"]["recipe"] == {
        "run.name": "one",
        "run.iterations": 100,
        "run.seed": 0,
        "rewards.0.type": "ocr",
        "rewards.0.weight": 1.0,
    }
    assert first["samples"] == {"heldout": [0, 2], "rollout": [0, 1, 2], "sheets": []}
    assert view.news(seen) is None
    written.iterate()
    written.alarm("it fell")
    view.refresh()
    second = view.news(seen)
    assert [row["iteration"] for row in second["metrics"]] == [3]
    assert [alarm["text"] for alarm in second["alarms"]] == ["it fell"]
    assert [band["iteration"] for band in second["bands"]] == [3]
    assert second["samples"]["rollout"] == [0, 1, 2, 3]
    assert "facts" not in second
    assert not second.get("reset")
    with MetricsLog(written.path / "metrics.jsonl") as log:
        log.truncate_after(1)
    view.refresh()
    third = view.news(seen)
    assert third["reset"]
    assert [row["iteration"] for row in third["metrics"]] == [0, 1]
    assert third["spans"] == len(view.spans)
    view.close()


def test_bands_are_over_the_newest_groups_of_an_iteration():
    store = GroupStore()
    means = [0.1, 0.4, 0.2, 0.5, 0.3]
    rows = [
        {"iteration": 7, "group": i, "mean": m, "min": m - 0.1, "max": m + 0.2, "ocr/mean": None, "num": 4}
        for i, m in enumerate(means)
    ]
    assert store.add([{**rows[0], "mean": 99.0, "max": 99.0}, *rows]) == {7}
    band = store.band(7)
    assert band["num"] == 5
    assert list(band["bands"]) == ["total"]
    assert band["bands"]["total"] == pytest.approx([0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.7])
    assert [row["group"] for row in store.of(7)] == [0, 1, 2, 3, 4]
    assert store.of(8) == []


def test_long_runs_are_thinned_and_keep_what_is_rare():
    rows = [{"iteration": i, **({"reward/heldout": 1.0} if i % 100 == 7 else {})} for i in range(20_000)]
    kept = thinned(rows)
    assert len(kept) <= MAX_ROWS
    assert {row["iteration"] for row in kept} >= {0, 19_999, *range(7, 20_000, 100)}
    assert np.diff([row["iteration"] for row in kept]).max() <= 10
    assert thinned(rows[:MAX_ROWS]) == rows[:MAX_ROWS]


def test_runs_are_found_and_told_apart(tmp_path):
    for name in ("a/7/glyphs", "b/7/glyphs", "b/8/other"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "recipe.toml").write_text("")
    views = find_runs([tmp_path / "a/7", tmp_path / "b/7/glyphs", tmp_path / "b/8"])
    assert [view.name for view in views] == ["a/7/glyphs", "b/7/glyphs", "b/8/other"]
    assert [view.name for view in find_runs([tmp_path / "a/7/glyphs"] * 2)] == ["glyphs"]
    with pytest.raises(ConfigError, match="is no run folder and has none in it"):
        find_runs([tmp_path])
    with pytest.raises(ConfigError, match="is no folder; give run folders"):
        find_runs([tmp_path / "nothing"])


# --- spans


def spans(num: int) -> SpanStore:
    store = SpanStore()
    for i in range(num):
        of = {"rollout": i // 64, "group": i // 4 % 16, "index": i % 4}
        start = 1.8e9 + i * 0.01
        store.add({"time_s": start, "name": "generate", "duration_s": 0.05, **of})
        store.add({"time_s": start + 0.05, "name": "reward", "duration_s": 0.02, **of})
        store.add(
            {"time_s": start, "name": "denoise", "duration_s": 0.008, "lane": f"engine:{i % 2}", "batch": i, **of}
        )
    return store


def test_a_window_has_every_span_that_touches_it():
    store = spans(100)
    store.add({"time_s": 1.8e9, "name": "alarm"})  # no duration: no span
    store.add({"time_s": 1.8e9 + 0.5, "name": "rollout", "duration_s": 0.25, "rollout": 0})
    store.add(
        {
            "time_s": 1.8e9 + 1,
            "name": "queue",
            "duration_s": 0.1,
            "lane": "engine:7",
            "rollout": 1,
            "group": 0,
            "index": 0,
        }
    )
    everything = store.window(limit=1000)
    assert (everything["total"], everything["sampled"]) == (302, 1)
    assert everything["extras"][everything["columns"]["extra"][-1]] == {
        "at": "engine:7"
    }  # and no lane: it does not work
    assert everything["lanes"] == ["", "engine:0", "engine:1", "rollout"]
    found = store.window(500_000, 505_000, limit=1000)
    columns = found["columns"]
    names = [found["names"][i] for i in columns["name"]]
    assert names.count("generate") == 6  # those that began at 0.45 to 0.50 s
    assert names.count("reward") == 3  # at 0.48 to 0.50 s, of those that began 50 ms earlier
    row = names.index("denoise")
    assert found["lanes"][columns["lane"][row]] == "engine:0"
    assert columns["start"][row] == pytest.approx(500_000, abs=1)
    assert columns["us"][row] == pytest.approx(8000, abs=0.2)
    assert (columns["rollout"][row], columns["group"][row], columns["index"][row]) == (0, 12, 2)
    assert found["extras"][columns["extra"][row]] == {"batch": 50}
    assert columns["iteration"][row] == NONE
    assert store.window(since=300, limit=1000)["columns"]["start"] == pytest.approx([500_000, 1_000_000], abs=1)


def test_where_there_are_too_many_lanes_are_merged_and_whole_microgroups_stay():
    store = spans(20_000)
    for i in range(900):
        known = {"name": "iteration", "duration_s": 0.2, "lane": "driver:0", "iteration": i}
        store.add({"time_s": 1.8e9 + 0.2 * i, **known})
    found = store.window(limit=4000)
    columns = {name: np.array(values) for name, values in found["columns"].items()}
    assert len(columns["start"]) <= 4100
    assert found["sampled"] > 1
    lanes = np.array(found["lanes"])[columns["lane"]]
    for lane in ("engine:0", "engine:1"):
        assert columns["count"][lanes == lane].sum() == 10_000
        covered = columns["us"][lanes == lane].sum()
        assert covered == pytest.approx(20_000 * 10_000, rel=0.05)  # 12 ms gaps are narrower than what is drawn
        assert columns["busy"][lanes == lane].sum() == pytest.approx(10_000 * 8_000, rel=1e-3)
    assert columns["iteration"][lanes == "driver:0"].tolist() == list(range(900))  # they stay as they are
    stages = lanes == ""
    names = np.array(found["names"])[columns["name"]][stages]
    key = [tuple(columns[name][stages][i] for name in ("rollout", "group", "index")) for i in range(stages.sum())]
    assert sorted(key[i] for i in np.flatnonzero(names == "generate")) == sorted(
        key[i] for i in np.flatnonzero(names == "reward")
    )
    gaps = np.diff(np.sort(columns["start"][stages][names == "generate"]))
    assert gaps.max() <= 2 * found["sampled"] * 10_000


# --- the server


@on_a_loop
async def test_the_stream_tells_what_there_is_and_then_what_is_new(written, tmp_path, monkeypatch):
    monkeypatch.setattr("verst.dashboard.server._SEARCH_S", 0.0)
    stream = Runs([written.path.parent]).messages()
    kind, data = await _message(stream)
    assert (kind, data) == ("runs", {"runs": [{"number": 0, "name": "one"}], "first": True})
    kind, data = await _message(stream)
    assert (kind, data["run"], len(data["metrics"])) == ("run", 0, 3)
    written.iterate()
    kind, data = await _message(stream)
    assert [row["iteration"] for row in data["metrics"]] == [3]
    other = WrittenRun(tmp_path / "another")
    kind, data = await _message(stream)
    assert (kind, data["runs"][1], data["first"]) == ("runs", {"number": 1, "name": "another"}, False)
    other.iterate()
    kind, data = await _message(stream)
    assert (kind, data["run"]) == ("run", 1)
    other.close()
    await stream.aclose()


async def _message(stream: AsyncIterator[str]) -> tuple[str, Any]:
    async with asyncio.timeout(60):
        text = await anext(stream)
    match = re.fullmatch(r"event: (\w+)\ndata: (.*)\n\n", text)
    assert match is not None
    return match[1], json.loads(match[2])


@on_a_loop
async def test_spans_groups_and_samples_are_served(written):
    async with client(written) as http:
        found = (await http.get("/api/runs/0/spans", params={"from": 0, "to": 1000, "limit": 50})).json()
        assert {"generate", "iteration"} <= {found["names"][i] for i in found["columns"]["name"]}
        assert all(start <= 1000 for start in found["columns"]["start"])
        groups = (await http.get("/api/runs/0/groups", params={"iteration": 1})).json()["groups"]
        assert [row["prompt"] for row in groups] == ["a 7"] * 3
        rows = (await http.get("/runs/0/samples/rollout/step_00000001/samples.json")).json()["samples"]
        assert [row["rank"] for row in rows] == ["best", "worst"] * 3
        picture = await http.get(f"/runs/0/samples/rollout/step_00000001/{rows[0]['picture']}")
        assert picture.headers["content-type"] == "image/png"
        part = await http.get(picture.request.url, headers={"range": "bytes=1-3"})
        assert (part.status_code, part.content) == (206, b"PNG")
        assert (await http.get("/api/runs/1/spans")).status_code == 404
        assert (await http.get("/api/runs/0/spans", params={"from": "soon"})).status_code == 400
        page = await http.get("/")
        assert page.text == live_page()
        assert "default-src 'none'" in page.headers["content-security-policy"]
        for source in re.findall(r'(?:src|href)="(/static/[^"]+)"', page.text):
            assert (await http.get(source)).status_code == 200


@on_a_loop
async def test_nothing_is_read_into_a_run_while_its_spans_are_looked_at(written, monkeypatch):
    monkeypatch.setattr("verst.dashboard.server.POLL_S", 0.0)
    order, looks, go_on = [], threading.Event(), threading.Event()
    read, window = RunView.refresh, SpanStore.window

    def said_read(view):
        order.append("read")
        read(view)

    def slow_window(store, *wanted, **more):
        order.append("look")
        looks.set()
        assert go_on.wait(60)
        order.append("seen")
        return window(store, *wanted, **more)

    monkeypatch.setattr(RunView, "refresh", said_read)
    monkeypatch.setattr(SpanStore, "window", slow_window)
    async with client(written) as http:
        both = [asyncio.create_task(http.get("/api/runs/0/spans"))]
        assert await asyncio.to_thread(looks.wait, 60)
        both.append(asyncio.create_task(http.get("/api/runs/0/spans")))
        await asyncio.sleep(0.1)  # the second would read by now
        go_on.set()
        answers = [answer.json() for answer in await asyncio.gather(*both)]
    assert order == ["read", "look", "seen"] * 2
    assert [len(answer["columns"]["start"]) for answer in answers] == [answer["total"] for answer in answers]


@on_a_loop
async def test_a_page_that_closes_while_files_are_read_leaves_no_second_reader(written, monkeypatch):
    order, begun, go_on = [], threading.Event(), threading.Event()
    read = RunView.refresh

    def slow_read(view):
        order.append("read")
        begun.set()
        assert go_on.wait(60)
        read(view)
        order.append("was read")

    monkeypatch.setattr(RunView, "refresh", slow_read)
    runs = Runs([written.path])

    async def look():
        async with runs.fresh():
            order.append("look")

    gone = asyncio.create_task(look())
    assert await asyncio.to_thread(begun.wait, 60)
    gone.cancel()
    with pytest.raises(asyncio.CancelledError):
        await gone
    after = asyncio.create_task(look())
    await asyncio.sleep(0.1)  # it would read by now
    go_on.set()
    await after
    assert order == ["read", "was read", "look"]
    runs.close()


def test_files_that_have_not_changed_are_not_read_again(written, monkeypatch):
    reads, parse = [], RunView._read_facts
    monkeypatch.setattr(RunView, "_read_facts", lambda view: reads.append(1) or parse(view))
    view, seen = RunView(written.path, name="one", number=0), Seen()
    for _ in range(3):
        view.refresh()
    view.news(seen)
    assert len(reads) == 1
    (written.path / "summary.json").write_text('{"iterations": 3}')
    view.refresh()
    assert view.news(seen)["facts"]["summary"] == {"iterations": 3}
    with (written.path / "metrics.jsonl").open("a") as file:
        file.write("no JSON\n")
    view.refresh()
    assert view.news(seen)["facts"]["damaged"] == 1
    assert len(reads) == 2
    view.close()


@on_a_loop
async def test_nothing_but_samples_of_the_given_runs_can_be_read(written, tmp_path):
    secret = tmp_path / "secret.json"
    secret.write_text("{}")
    (written.path / "samples" / "link.json").symlink_to(secret)
    (written.path / "samples" / "notes.txt").write_text("not a sample")
    async with client(written) as http:
        for name in (
            "../recipe.toml",
            "%2e%2e/run.json",
            "..%2f..%2fsecret.json",
            "link.json",
            "notes.txt",
            "/etc/passwd",
            str(secret),
            "rollout",
            "rollout/step_00000001/nothing.png",
        ):
            assert (await http.get(f"/runs/0/samples/{name}")).status_code == 404, name
        assert (await http.get("/static/../server.py")).status_code == 404
        assert (await http.get("/", headers={"host": "evil.example"})).status_code == 403
        assert (await http.get("/api/stream", headers={"origin": "http://evil.example"})).status_code == 403


@on_a_loop
async def test_elsewhere_than_on_loopback_a_browser_gives_the_token_once(written):
    async with client(written, TOKEN) as http:
        assert (await http.get("/api/runs/0/spans")).status_code == 401
        assert (await http.get("/api/runs/0/spans", headers={"authorization": f"Bearer {TOKEN}"})).status_code == 200
        sent = await http.get("/", headers={"accept": "text/html"})
        assert (sent.status_code, sent.headers["location"]) == (303, "/login")
        assert 'name="token"' in (await http.get("/login")).text
        assert (await http.post("/login", data={"token": "wrong"})).status_code == 401
        assert (await http.post("/login", content=b"token=" + b"x" * 10_000)).status_code == 413
        assert (await http.get("/api/runs/0/spans")).status_code == 401
        right = await http.post("/login", data={"token": TOKEN})
        assert right.status_code == 303
        assert {"httponly", "samesite=strict"} <= set(right.headers["set-cookie"].lower().split("; "))
        assert TOKEN not in right.headers["set-cookie"]
        assert (await http.get("/api/runs/0/spans")).status_code == 200
        assert "<main" in (await http.get("/")).text


def test_others_can_reach_it_only_with_a_token(written, monkeypatch):
    monkeypatch.delenv("VERST_TOKEN", raising=False)
    with pytest.raises(ConfigError, match=r"--host = '0\.0\.0\.0' can be reached from other machines: .*VERST_TOKEN"):
        app(["dashboard", str(written.path), "--host", "0.0.0.0", "--port", "0"], standalone_mode=False)


# --- one file


def exported(path: Path) -> dict[str, Any]:
    text = path.read_text()
    match = re.search(r'<script type="application/json" id="exported">(.*?)</script>', text)
    assert match is not None
    return json.loads(match[1])


def test_a_run_in_one_file(written, tmp_path, capsys):
    written.iterate(prompt="</script><b>")
    page = tmp_path / "run.html"
    app(["dashboard", str(written.path), "--export", str(page)], standalone_mode=False)
    assert str(page) in capsys.readouterr().out
    data = exported(page)
    assert data["runs"] == [{"number": 0, "name": "one"}]
    (message,) = data["messages"]
    assert [row["iteration"] for row in message["metrics"]] == [0, 1, 2, 3]
    assert message["samples"] == {"heldout": [0, 2], "rollout": [0, 1, 2, 3], "sheets": []}
    assert data["samples"]["0"]["rollout"]["3"][0]["picture"].startswith("data:image/png;base64,")
    assert data["groups"]["0"]["3"][0]["prompt"] == "</script><b>"
    assert data["spans"]["0"]["total"] > 0
    text = page.read_text()
    assert not re.search(r"""(?:src|href)=["'](?!data:|#|verst/)""", text)
    modules = json.loads(re.search(r'<script type="importmap">(.*?)</script>', text)[1])["imports"]
    assert set(modules) == {f"verst/{path.name}" for path in STATIC.glob("*.js")}


def test_the_file_is_bounded_and_covers_the_run(written, tmp_path):
    for _ in range(30):
        written.iterate()
    views = find_runs([written.path])
    page = tmp_path / "run.html"
    everything = export(views, page, max_bytes=10**8)
    bound = everything - 60_000
    size = export(views, page, max_bytes=bound)
    assert size == page.stat().st_size
    assert bound - 30_000 < size <= bound
    data = exported(page)
    kept = data["messages"][0]["samples"]["rollout"]
    assert kept[0] == 0
    assert kept[-1] == 32
    assert 2 < len(kept) < 33
    assert "samples are left out" in data["note"]
    with pytest.raises(ConfigError, match=r"the numbers of these runs take \d+ bytes, more than --max-mb"):
        export(views, page, max_bytes=10_000)


def test_the_order_of_what_is_kept_is_coarse_to_fine():
    order = spread_order(list(range(17)))
    assert order[:5] == [16, 0, 8, 4, 12]
    assert sorted(order) == list(range(17))
    assert (spread_order([]), spread_order([3])) == ([], [3])


def test_the_files_of_the_page_and_the_recipes_are_in_the_wheel(tmp_path):
    build = (
        "import sys; from setuptools import setup; sys.argv = ['setup.py', '-q', 'build', '-b', sys.argv[1]]; setup()"
    )
    root = Path(__file__).parents[1]
    subprocess.run([sys.executable, "-c", build, str(tmp_path)], cwd=root, check=True, capture_output=True)
    shipped = {path.name for path in (tmp_path / "lib" / "verst" / "dashboard" / "static").iterdir()}
    assert shipped == {path.name for path in STATIC.iterdir()}
    recipes = [path.relative_to(root) for path in (root / "recipes").iterdir()]
    assert [(tmp_path / "lib" / "verst" / path).read_text() for path in recipes] == [
        (root / path).read_text() for path in recipes
    ]
