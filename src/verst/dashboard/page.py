"""The page's files, and all of them in one."""

from __future__ import annotations

import base64
import json
import re
from pathlib import Path
from typing import Any

STATIC = Path(__file__).parent / "static"
_MAIN = "main.js"
_IMPORT = re.compile(r'(\bfrom\s+|\bimport\s+)"\./([\w-]+\.js)"')


def live_page() -> str:
    """index.html, whose style and modules the browser asks for."""
    head = '<link rel="stylesheet" href="/static/style.css">'
    return _index().replace("<!--head-->", head).replace("<!--script-->", _script(f"/static/{_MAIN}"))


def single_file(data: Any) -> str:
    """The page with style, modules and `data` in it: nothing else is needed to open it from a disk.

    Each module is a data: URL; they find each other by the names that an import map gives them.
    """
    modules = {f"verst/{path.name}": _data_url(path) for path in sorted(STATIC.glob("*.js"))}
    head = "\n".join(
        (
            f"<style>{(STATIC / 'style.css').read_text(encoding='utf-8')}</style>",
            f'<script type="importmap">{_inline({"imports": modules})}</script>',
        )
    )
    script = f'<script type="application/json" id="exported">{_inline(data)}</script>\n' + (
        f'<script type="module">import "verst/{_MAIN}";</script>'
    )
    return _index().replace("<!--head-->", head).replace("<!--script-->", script)


def _index() -> str:
    return (STATIC / "index.html").read_text(encoding="utf-8")


def _script(source: str) -> str:
    return f'<script type="module" src="{source}"></script>'


def _data_url(path: Path) -> str:
    text = _IMPORT.sub(r'\1"verst/\2"', path.read_text(encoding="utf-8"))
    return "data:text/javascript;base64," + base64.b64encode(text.encode()).decode()


def _inline(value: Any) -> str:
    """JSON that cannot end the script element that it stands in."""
    return json.dumps(value, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
