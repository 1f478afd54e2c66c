"""Programs and files of the system that make or verify artefacts."""

import os
import shutil
import subprocess
from pathlib import Path

from .report import Unavailable

# Whether missing packages of Debian may be installed.
installs = False


def need(command: str, *packages: str) -> str:
    """The path of a command. If it is missing, its packages are installed where that was allowed."""
    if which(command) is None and installs:
        install(*packages)
    found = which(command)
    if found is None:
        raise Unavailable(f"`{command}` is missing: install {' '.join(packages)} (on Debian, --install does)")
    return found


def install(*packages: str) -> None:
    """Installs packages of Debian, if root can."""
    if os.geteuid() != 0 or not shutil.which("apt-get"):
        return
    print(f"installing {' '.join(packages)}", flush=True)
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    for step in (["update", "-qq"], ["install", "-y", "-qq", "--no-install-recommends", *packages]):
        done = subprocess.run(["apt-get", *step], env=environment, capture_output=True, text=True)
        if done.returncode != 0:
            raise Unavailable(f"apt-get cannot install {' '.join(packages)}: {done.stderr[-500:]}")


def which(command: str) -> str | None:
    """The path of a command, also of those for administrators."""
    return shutil.which(command, path=os.environ.get("PATH", os.defpath) + ":/usr/sbin:/sbin")


def bootstrap(system: Path, *options: str, suite: tuple[str, ...] | None = None) -> None:
    """Makes a system of Debian in a new folder; a suite is a release, and a mirror if not the usual ones."""
    release, *mirrors = suite or (distribution(),)
    command = [need("mmdebstrap", "mmdebstrap"), "--quiet", *options, release, system, *mirrors]
    done = subprocess.run(command, text=True, capture_output=True)
    if done.returncode != 0:
        raise Unavailable(f"mmdebstrap cannot make a system of {release}: {done.stderr.strip()[-500:]}")


def distribution(root: Path = Path("/")) -> str:
    """The release of Debian that a system has."""
    lines = (root / "etc/os-release").read_text().splitlines()
    names = [line.partition("=")[2] for line in lines if line.startswith("VERSION_CODENAME=")]
    return names[0] if names else "stable"
