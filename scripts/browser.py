"""A headless Chromium for the dashboard's tests, where the machine has none: Debian's, unpacked into build/browser.

python scripts/browser.py

Prints the program to start. Nothing is installed on the machine: the packages and those that they need and are not
there are downloaded by name and unpacked. VERST_BROWSER, or a chromium in PATH, is taken instead.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1] / "build" / "browser"
NAMES = ("chromium", "chromium-browser", "google-chrome")
PACKAGES = ("chromium", "fonts-dejavu-core")
LAUNCHER = """#!/bin/sh
root=$(dirname "$(readlink -f "$0")")/root/usr
libraries=$(echo "$root"/lib/*-linux-gnu)
export LD_LIBRARY_PATH="$libraries:$libraries/pulseaudio:$LD_LIBRARY_PATH" XDG_DATA_HOME="$root/share"
exec "$root/lib/chromium/chromium" "$@"
"""


def find() -> Path | None:
    """VERST_BROWSER, one in PATH, or the one that was unpacked."""
    named = os.environ.get("VERST_BROWSER")
    if named:
        return Path(named)
    installed = next(filter(None, map(shutil.which, NAMES)), None)
    if installed:
        return Path(installed)
    unpacked = ROOT / "chromium"
    return unpacked if unpacked.exists() else None


def unpack() -> Path:
    debs = ROOT / "debs"
    shutil.rmtree(ROOT, ignore_errors=True)
    debs.mkdir(parents=True)
    try:
        _download(debs)
    except subprocess.CalledProcessError:
        if os.geteuid() != 0:
            sys.exit(f"apt-get cannot get {' and '.join(PACKAGES)}: run apt-get update as root, or set VERST_BROWSER")
        # A fresh machine has no lists of packages yet, an old one has those of files that are gone.
        subprocess.run(["apt-get", "-q", "update"], check=True, stdout=subprocess.DEVNULL)
        _download(debs)
    for deb in sorted(debs.glob("*.deb")):
        subprocess.run(["dpkg-deb", "-x", str(deb), str(ROOT / "root")], check=True)
    shutil.rmtree(debs)
    launcher = ROOT / "chromium"
    launcher.write_text(LAUNCHER)
    launcher.chmod(0o755)
    subprocess.run([launcher, "--no-sandbox", "--version"], check=True, stdout=sys.stderr)
    return launcher


def _download(folder: Path) -> None:
    """The packages, and what of theirs this machine does not have. Raises CalledProcessError."""
    ask = ["apt-get", "install", "--simulate", "--no-install-recommends", *PACKAGES]
    answer = subprocess.run(ask, capture_output=True, text=True, check=True)
    missing = [line.split()[1] for line in answer.stdout.splitlines() if line.startswith("Inst ")]
    subprocess.run(["apt-get", "-q", "download", *missing], cwd=folder, check=True, stdout=subprocess.DEVNULL)


def main() -> None:
    found = find()
    if found is None and shutil.which("apt-get") is None:
        sys.exit("there is no Chromium here: install one, or set VERST_BROWSER to the program")
    print(found or unpack())


if __name__ == "__main__":
    main()
