"""Programs of the system that make or verify artefacts."""

import os
import shutil
import subprocess

from .report import Unavailable


def need(command: str, *packages: str) -> str:
    """The path of a command. On Debian, as root, its packages are installed if it is missing."""
    found = which(command)
    if found is None and os.geteuid() == 0 and shutil.which("apt-get"):
        print(f"installing {' '.join(packages)}", flush=True)
        environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
        for step in (["update", "-qq"], ["install", "-y", "-qq", "--no-install-recommends", *packages]):
            done = subprocess.run(["apt-get", *step], env=environment, capture_output=True, text=True)
            if done.returncode != 0:
                raise Unavailable(f"apt-get cannot install {' '.join(packages)}: {done.stderr[-500:]}")
        found = which(command)
    if found is None:
        raise Unavailable(f"`{command}` is missing: install {' '.join(packages)}")
    return found


def which(command: str) -> str | None:
    """The path of a command, also of those for administrators."""
    return shutil.which(command, path=os.environ.get("PATH", os.defpath) + ":/usr/sbin:/sbin")
