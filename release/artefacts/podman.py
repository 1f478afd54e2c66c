"""Runs images with podman, in a storage of its own."""

import shutil
import subprocess

from .contents import Release
from .oci import FOLDER, USER
from .report import Unavailable
from .tools import need, which
from .trial import prove

# Where a container for another processor finds the emulator.
EMULATOR = "/qemu"
# What podman and the runtime exit with if they fail themselves.
FAILURES = (125, 126, 127)


def run(release: Release, fetch: list[str]) -> str:
    """Has podman fetch an image, and runs it with a read-only root as a user without rights."""
    podman = need("podman", "podman", "runc")
    storage = release.folder / "podman"
    base = [
        podman,
        f"--root={storage}/root",
        f"--runroot={storage}/run",
        "--storage-driver=vfs",
        "--cgroup-manager=cgroupfs",
    ]
    if which("runc"):
        base.append(f"--runtime={which('runc')}")
    fetched = subprocess.run([*base, *fetch], text=True, capture_output=True)
    if fetched.returncode != 0:
        raise Unavailable(f"podman cannot read it: {fetched.stderr.strip()[-300:]}")
    image = fetched.stdout.strip().rsplit(maxsplit=1)[-1]
    # The limits are those that may be had where this machine is itself a container.
    options = [
        "--rm",
        "--read-only",
        f"--user={USER}",
        "--network=host",
        "--ulimit=nofile=4096:4096",
        "--ulimit=nproc=4096:4096",
    ]
    command = [*base, "run", *options]
    if release.arch.is_native:
        router = [*command, image]
        shim = [*command, f"--entrypoint=/{FOLDER}/splitrail-shim", image]
    else:
        command += [f"--volume={release.arch.qemu()}:{EMULATOR}:ro", f"--entrypoint={EMULATOR}"]
        router, shim = ([*command, image, f"/{FOLDER}/{program.name}"] for program in release.programs)
    try:
        tried = subprocess.run([*router, "--version"], text=True, capture_output=True)
        if tried.returncode in FAILURES:
            raise Unavailable(f"podman cannot run a container here: {tried.stderr.strip()[-300:]}")
        return prove(release, router, shim, f"run by podman with a read-only root as user {USER}")
    finally:
        subprocess.run([*base, "rmi", "--all", "--force"], capture_output=True)
        shutil.rmtree(storage, ignore_errors=True)
