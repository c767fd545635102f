"""A run, or several, as one file to mail: the same page with a sample of what the live one would ask for."""

from __future__ import annotations

import base64
import json
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from verst.dashboard.page import single_file
from verst.dashboard.run import KINDS, RunView, Seen, every_nth
from verst.errors import ConfigError
from verst.obs.samples import Kind
from verst.obs.waiting import Tell, nobody

MAX_SPANS = 30_000
"""Of all runs together."""
MAX_GROUP_ITERATIONS = 200
"""Of one run, whose groups are listed."""
_TYPES = {".png": "image/png", ".webp": "image/webp", ".webm": "video/webm"}


def export(views: Sequence[RunView], path: Path, *, max_bytes: int, tell: Tell = nobody) -> int:
    """Write the file, in place of what is there; its bytes. Raises ConfigError where even the numbers need more.

    max_bytes: samples are put in as long as there is room: of each run the newest and the first iterations, then ever
    finer between them.
    """
    for number, view in enumerate(views):
        tell(f"reading {view.path}, runs", done=number, total=len(views))
        view.refresh()
    tell("reading groups and spans")
    data = _numbers(views)
    room = max_bytes - len(single_file(data).encode())
    if room < 0:
        raise ConfigError(
            f"the numbers of these runs take {max_bytes - room} bytes, more than --max-mb = {max_bytes / 1e6:g}; "
            "raise it, or export fewer runs"
        )
    left_out = _add_samples(data, views, room, tell)
    if left_out:
        data["note"] += f"; of {left_out} more iterations the samples are left out"
    tell(f"writing {path}")
    text = single_file(data)
    partial = path.with_name(path.name + ".partial")
    path.parent.mkdir(parents=True, exist_ok=True)
    partial.write_text(text, encoding="utf-8")
    os.replace(partial, path)
    return path.stat().st_size


def _numbers(views: Sequence[RunView]) -> dict[str, Any]:
    """Everything but pictures, clips and sound."""
    listed = {view.number: every_nth(view.groups.iterations(), MAX_GROUP_ITERATIONS) for view in views}
    messages = [message for view in views if (message := view.news(Seen())) is not None]
    for message in messages:
        message["samples"] = {kind: [] for kind in (*KINDS, "sheets")}
    return {
        "runs": [{"number": view.number, "name": view.name} for view in views],
        "messages": messages,
        "spans": {view.number: view.spans.window(limit=MAX_SPANS // len(views)) for view in views},
        "groups": {view.number: {i: view.groups.of(i) for i in listed[view.number]} for view in views},
        "samples": {view.number: {kind: {} for kind in KINDS} for view in views},
        "sheets": {view.number: {} for view in views},
        "note": time.strftime("as of %Y-%m-%d %H:%M", time.localtime()),
    }


def _add_samples(data: dict[str, Any], views: Sequence[RunView], room: int, tell: Tell) -> int:
    """Fill `room` bytes; how many iterations had to stay out."""
    left_out = 0
    told = {message["run"]: message["samples"] for message in data["messages"]}
    wanted = list(_in_turn(views))
    for number, (view, kind, iteration) in enumerate(wanted):
        tell("packing samples, iterations", done=number, total=len(wanted))
        shown = _shown(view, kind, iteration)
        size = len(json.dumps(shown)) + 40
        if size > room:
            left_out += 1
            continue
        room -= size
        told[view.number][kind].append(iteration)
        if kind == "sheets":
            data["sheets"][view.number][iteration] = shown
        else:
            data["samples"][view.number][kind][iteration] = shown
            # What "best and worst" says of a group is there whichever iterations were listed.
            data["groups"][view.number].setdefault(iteration, view.groups.of(iteration))
    for kinds in told.values():
        for kind in kinds:
            kinds[kind].sort()
    return left_out


def _in_turn(views: Sequence[RunView]) -> Iterator[tuple[RunView, str, int]]:
    """(run, kind, iteration): all of them, so that any beginning covers each run and kind evenly."""
    queues = [(view, kind, spread_order(iterations)) for view in views for kind, iterations in kinds_of(view).items()]
    for place in range(max((len(queue) for _, _, queue in queues), default=0)):
        for view, kind, queue in queues:
            if place < len(queue):
                yield view, kind, queue[place]


def kinds_of(view: RunView) -> dict[str, list[int]]:
    """Iterations by kind; grids only where nothing better is there."""
    return {kind: steps for kind, steps in view.samples.items() if kind != "sheets" or not view.samples["heldout"]}


def spread_order(values: Sequence[int]) -> list[int]:
    """The last, the first, then the middles of what lies between, coarse to fine."""
    if not values:
        return []
    order, spans = [len(values) - 1, 0], [(0, len(values) - 1)]
    while spans:
        low, high = spans.pop(0)
        middle = (low + high) // 2
        if middle not in (low, high):
            order.append(middle)
            spans += [(low, middle), (middle, high)]
    return [values[i] for i in dict.fromkeys(order)]


def _shown(view: RunView, kind: str, iteration: int) -> Any:
    """Rows as the live page gets them, with the files in them; of a sheet its file."""
    step = f"step_{iteration:08d}"
    if kind == "sheets":
        return _data_url(view, f"{step}.png")
    typed: Kind = "heldout" if kind == "heldout" else "rollout"
    rows = view.shown(typed, iteration)
    for row in rows:
        for key in ("picture", "clip"):
            if key in row:
                row[key] = _data_url(view, f"{kind}/{step}/{row[key]}")
    return rows


def _data_url(view: RunView, name: str) -> str:
    path = view.file(name)
    if path is None:
        return ""
    return f"data:{_TYPES[path.suffix]};base64,{base64.b64encode(path.read_bytes()).decode()}"
