"""What the repository says of itself: version, time, and its third-party crates."""

import functools
import json
import os
import subprocess
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# Archives of Zip know no earlier time: the first of January 1980, in seconds since 1970.
EARLIEST_S = 315_532_800
# Those with which the programs were built, as options of cargo; none for a plain build.
FEATURES = ["--all-features"]


def run(*command: str | Path, **options) -> str:
    """Runs a command in the root folder and returns what it prints."""
    done = subprocess.run(command, cwd=ROOT, check=True, text=True, stdout=subprocess.PIPE, **options)
    return done.stdout


@functools.cache
def workspace() -> dict:
    """`[workspace.package]` of Cargo.toml."""
    return tomllib.loads((ROOT / "Cargo.toml").read_text())["workspace"]["package"]


@functools.cache
def host() -> str:
    """The target of the Rust compiler here."""
    for line in run("rustc", "-vV").splitlines():
        if line.startswith("host: "):
            return line.removeprefix("host: ")
    raise SystemExit("`rustc -vV` names no host")


@functools.cache
def epoch_s() -> int:
    """The time of all files in archives: `SOURCE_DATE_EPOCH`, or that of the commit."""
    given = os.environ.get("SOURCE_DATE_EPOCH")
    if given is None:
        try:
            given = run("git", "log", "-1", "--format=%ct", stderr=subprocess.DEVNULL)
        except (OSError, subprocess.CalledProcessError):
            given = "0"
    return max(int(given), EARLIEST_S)


@functools.cache
def commit() -> str | None:
    """The commit that is packaged, if the repository is there."""
    try:
        return run("git", "rev-parse", "HEAD", stderr=subprocess.DEVNULL).strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def cargo(*args: str) -> str:
    """Runs cargo with the locked versions."""
    return run(os.environ.get("CARGO", "cargo"), *args, "--locked")


@functools.cache
def metadata(target: str) -> dict:
    """`cargo metadata` for a target."""
    return json.loads(cargo("metadata", "--format-version=1", *FEATURES, f"--filter-platform={target}"))


@functools.cache
def checksums() -> dict[tuple[str, str], str]:
    """The SHA-256 of the published crates of Cargo.lock, by name and version."""
    lock = tomllib.loads((ROOT / "Cargo.lock").read_text())
    crates = [crate for crate in lock["package"] if "checksum" in crate]
    return {(crate["name"], crate["version"]): crate["checksum"] for crate in crates}


@functools.cache
def crates(program: str, target: str, edges: str) -> frozenset[tuple[str, str]]:
    """Names and versions of the crates that `cargo tree` finds below a program."""
    tree = cargo(
        "tree",
        f"--package={program}",
        *FEATURES,
        f"--target={target}",
        f"--edges={edges}",
        "--prefix=none",
        "--format={p}",
    )
    found = set()
    for line in tree.splitlines():
        name, version = line.split()[:2]
        found.add((name, version.removeprefix("v")))
    return frozenset(found)


def linked(program: str, target: str) -> frozenset[tuple[str, str]]:
    """The crates whose code is in a program."""
    return crates(program, target, "normal,no-proc-macro")


def used(program: str, target: str) -> frozenset[tuple[str, str]]:
    """The crates that are linked or run while a program is built."""
    return crates(program, target, "normal,build")
