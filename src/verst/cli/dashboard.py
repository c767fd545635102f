"""`verst dashboard`: the live page of runs, or one file of it."""

from __future__ import annotations

from pathlib import Path

from verst.cli.options import waiting


def run(runs: list[Path], *, host: str, port: int, export: Path | None, max_mb: float, quiet: bool) -> None:
    if export is None:
        from verst.dashboard.server import serve

        serve(runs, host=host, port=port)
        return
    from verst.dashboard.export import export as write
    from verst.dashboard.run import find_runs

    views = find_runs(runs)
    with waiting(quiet=quiet) as tell:
        size = write(views, export, max_bytes=int(max_mb * 1e6), tell=tell)
    print(f"{export}: {size / 1e6:.1f} MB, {len(views)} run(s)")
