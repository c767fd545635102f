"""`verst doctor`: is this machine fit to run verst, a model folder, or a recipe; and what to do where it is not."""

from __future__ import annotations

import importlib.metadata
import platform
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from verst.cli.options import print_json, waiting

NAMED = ("torch", "diffusers", "transformers", "peft", "ray", "safetensors")
"""Requirements with a line of their own; of the others only those that are amiss have one."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One line of the report."""

    name: str
    level: Literal["ok", "warn", "fail"]
    text: str
    """What was found."""
    remedy: str = ""
    """What to do; empty where nothing is amiss."""


def run(target: Path | None, *, as_json: bool, quiet: bool) -> bool:
    """Prints what was found, with `quiet` only what is amiss; False where something fails."""
    with waiting(quiet=quiet or as_json) as tell:
        tell("looking at the machine")
        from verst.cli.doctor_machine import machine_findings

        findings = [*software(), *machine_findings()]
        if target is not None:
            from verst.cli.doctor_target import target_findings

            tell(f"looking at {target}")
            # What a recipe asks of disk, files and shared memory takes the place of what any run does.
            more = target_findings(target)
            findings = [f for f in findings if f.name not in {g.name for g in more}] + more
    shown = [f for f in findings if f.level != "ok"] if quiet else findings
    if as_json:
        print_json({"ok": fit(findings), "checks": shown})
    elif shown:
        print(report(shown))
    return fit(findings)


def fit(findings: Sequence[Finding]) -> bool:
    return all(finding.level != "fail" for finding in findings)


def report(findings: Sequence[Finding]) -> str:
    """As lines."""
    width = max(len(finding.name) for finding in findings)
    lines = []
    for finding in findings:
        lines.append(f"{finding.level:4}  {finding.name:{width}}  {finding.text}")
        if finding.remedy:
            lines.append(f"{'':4}  {'':{width}}  -> {finding.remedy}")
    counts = {level: sum(f.level == level for f in findings) for level in ("ok", "warn", "fail")}
    lines.append(", ".join(f"{number} {level}" for level, number in counts.items()))
    return "\n".join(lines)


def software() -> list[Finding]:
    """Python and every package that verst requires, against the versions it states."""
    try:
        stated = importlib.metadata.metadata("verst")["Requires-Python"]
        requirements = importlib.metadata.requires("verst") or []
    except importlib.metadata.PackageNotFoundError:
        remedy = "pip install -e . in the clone, or `make install`"
        return [Finding(name="verst", level="fail", text="is not installed as a package", remedy=remedy)]
    return [python(platform.python_version(), stated), *packages(requirements, installed)]


def installed(name: str) -> str | None:
    """The version of an installed package."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def python(version: str, stated: str) -> Finding:
    from packaging.specifiers import SpecifierSet

    if SpecifierSet(stated).contains(_plain(version), prereleases=True):
        return Finding(name="python", level="ok", text=f"{version} on {platform.machine()}")
    remedy = f"make a virtual environment with Python {stated} and install verst there"
    return Finding(name="python", level="fail", text=f"{version}, verst needs {stated}", remedy=remedy)


def packages(requirements: Sequence[str], version_of: Callable[[str], str | None]) -> list[Finding]:
    """requirements: as pyproject.toml states them. Extras are left out: who asks for one is told by what needs it."""
    from packaging.requirements import Requirement

    findings, others = [], 0
    for text in requirements:
        required = Requirement(text)
        if required.marker is not None and not required.marker.evaluate({"extra": ""}):
            continue
        found = package(required.name, str(required.specifier), version_of(required.name))
        if required.name in NAMED or found.level != "ok":
            findings.append(found)
        else:
            others += 1
    return [*findings, Finding(name="packages", level="ok", text=f"{others} others are as required")]


def package(name: str, stated: str, version: str | None) -> Finding:
    """stated: PEP 440 specifiers, e.g. `>=2.11`. version: the installed one, None where there is none."""
    from packaging.specifiers import SpecifierSet

    if version is None:
        return Finding(name=name, level="fail", text="is not installed", remedy=f"pip install '{name}{stated}'")
    if SpecifierSet(stated).contains(_plain(version), prereleases=True):
        return Finding(name=name, level="ok", text=version)
    return Finding(
        name=name, level="fail", text=f"{version}, verst needs {stated}", remedy=f"pip install '{name}{stated}'"
    )


def _plain(version: str) -> str:
    """Without what a build or a distribution adds behind a plus."""
    return re.sub(r"\+.*$", "", version)
