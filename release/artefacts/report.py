"""What was made, how it was verified, and what is missing."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .contents import Release

MEGABYTE = 1_000_000


class Unavailable(Exception):
    """This machine cannot make or verify an artefact. The text says why, and what to do."""


class Report:
    """Collects the files and the verdicts of a run."""

    def __init__(self, output: Path, releases: list[Release], verifies: bool) -> None:
        self.output = output
        self.releases = releases
        self.verifies = verifies
        self.missing: list[str] = []
        self.verified: dict[str, list[str]] = {}

    def save(self, name: str, data: bytes, max_bytes: int | None = None) -> Path:
        """Writes an artefact. It is an error if it is larger than `max_bytes`."""
        if max_bytes is not None and len(data) > max_bytes:
            raise SystemExit(f"{name} has {len(data)} bytes, more than {max_bytes}")
        path = self.output / name
        path.write_bytes(data)
        self.verified[name] = []
        return path

    def verify(self, path: Path, how: str) -> None:
        """Records a check that an artefact has passed."""
        print(f"{path.name}: {how}", flush=True)
        self.verified[path.name].append(how)

    def incomplete(self, name: str, why: str) -> None:
        """Records an artefact that was not made or not verified."""
        print(f"{name}: {why}", flush=True)
        self.missing.append(f"{name}: {why}")

    def write(self, place: Path, published: tuple[str, ...]) -> None:
        """Writes `SIZES`, and prints the summary, with what is missing of the published targets.
        `place` is where the files will be."""
        sizes = [
            (f"{program.name} for {release.arch.linux} (stripped)", len(program.data))
            for release in self.releases
            for program in release.programs
        ]
        sizes += [(name, (self.output / name).stat().st_size) for name in sorted(self.verified)]
        (self.output / "SIZES").write_text("".join(f"{size:>12}  {name}\n" for name, size in sizes))
        print(f"\n{place}")
        for name, size in sizes:
            checks = "; ".join(self.verified.get(name, []))
            print(f"{size / MEGABYTE:8.1f} MB  {name}" + (f": {checks}" if checks else ""))
        print()
        for release in self.releases:
            glibc = ".".join(map(str, release.glibc))
            print(f"The programs for {release.arch.linux} need Linux with glibc {glibc} or later", end=" ")
            print(f"(measured: {release.glibc_because}).")
        made = [f"{release.arch.target}." for release in self.releases]
        others = [target for target in published if not target.startswith(tuple(made))]
        if others:
            print(f"Not made, because only other programs were asked for: those of {', '.join(others)}.")
        for missing in self.missing:
            print(f"INCOMPLETE: {missing}")
