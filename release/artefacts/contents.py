"""What all artefacts contain: the stripped programs, documents, licences, manual pages."""

import functools
import json
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

from . import licences, sbom
from .architecture import Architecture, architecture
from .archive import Tree
from .report import Unavailable
from .source import ROOT, epoch_s, workspace

NAMES = ("splitrail", "splitrail-shim")
# Of each program, in bytes.
PROGRAM_MAX_BYTES = 44_000_000
# What every glibc system has, and wheels may therefore rely on (PEP 600).
SYSTEM_LIBRARIES = {"libc.so.6", "libm.so.6", "libgcc_s.so.1", "libdl.so.2", "libpthread.so.0", "librt.so.1"}


@dataclass(frozen=True)
class Program:
    """A stripped program."""

    name: str
    path: Path
    data: bytes
    arch: Architecture
    # Symbols of the newest version of glibc that it needs, and this version.
    glibc: tuple[int, ...]
    glibc_symbols: tuple[str, ...]
    # The shared libraries that it names, without the loader.
    libraries: frozenset[str]

    def command(self, path: Path | None = None, root: Path | None = None) -> list:
        """What starts the program, from a path and with the libraries below a folder."""
        return [*self.arch.emulator(root), path or self.path]


class Release:
    """The programs of a release, and what goes with them."""

    def __init__(self, programs: Path, folder: Path, plain: bool) -> None:
        self.version = workspace()["version"]
        self.epoch_s = epoch_s()
        # For everything that is not an artefact.
        self.folder = folder
        self.programs = [strip(programs / name, folder) for name in NAMES]
        for program in self.programs:
            if not plain and (missing := lacking(program)):
                raise SystemExit(
                    f"{program.name} was built without {', '.join(missing)}: use --all-features, or say --plain"
                )
        self.arch = self.programs[0].arch
        newest = max(self.programs, key=lambda program: program.glibc)
        self.glibc = newest.glibc
        self.glibc_because = f"`objdump -T {newest.name}` has {', '.join(newest.glibc_symbols[:3])}"

    @property
    def libraries(self) -> frozenset[str]:
        """The shared libraries that the programs name."""
        return frozenset().union(*(program.libraries for program in self.programs))

    @property
    def packages(self) -> list[str]:
        """The packages of Debian that have these libraries."""
        return ["libc6", *(["libgcc-s1"] if "libgcc_s.so.1" in self.libraries else [])]

    @property
    def file_stem(self) -> str:
        """The beginning of the names of artefacts."""
        return f"splitrail-{self.version}"

    def binaries(self) -> Tree:
        """The programs alone."""
        tree = Tree()
        for program in self.programs:
            tree.file(program.name, program.data, 0o755)
        return tree

    @functools.cached_property
    def sboms(self) -> dict[str, bytes]:
        """The file names and contents of the bills of materials."""
        return {
            f"{program.name}-{self.version}-{self.arch.linux}.cdx.json": sbom.of(program, self)
            for program in self.programs
        }

    @functools.cached_property
    def third_party(self) -> str:
        """The licences of everything that is linked into the programs."""
        return licences.text(self.arch.target, NAMES)

    @functools.cached_property
    def manual(self) -> Tree:
        """Manual pages, if the programs write them."""
        tree = Tree()
        for program in self.programs:
            folder = self.folder / f"man-{program.name}"
            folder.mkdir()
            if tells(program, "man", "--output", str(folder)) is not None:
                for page in sorted(folder.iterdir()):
                    tree.file(page.name, page.read_bytes())
        return tree

    def completions(self, places: dict[str, str]) -> Tree:
        """Completions by shell at these places, with the program for `PROGRAM`, if they print them."""
        tree = Tree()
        for program in self.programs:
            for shell, place in places.items():
                text = tells(program, "completions", shell)
                if text:
                    tree.file(place.replace("PROGRAM", program.name), text)
        return tree


def tells(program: Program, *args: str) -> str | None:
    """What a program prints; nothing if it refuses the arguments or cannot run here."""
    try:
        command = [*program.command(), *args]
        done = subprocess.run(command, text=True, capture_output=True, timeout=60)
    except (OSError, Unavailable):
        return None
    return done.stdout if done.returncode == 0 else None


def lacking(program: Program) -> list[str]:
    """The optional parts that a program does not have, if it tells."""
    told = tells(program, "version", "--json")
    return [name for name, has in json.loads(told)["features"].items() if not has] if told else []


def strip(path: Path, folder: Path) -> Program:
    """Strips a program and measures what it needs."""
    if not path.is_file():
        raise SystemExit(f"{path} is missing: --programs names a folder with {' and '.join(NAMES)}")
    with path.open("rb") as file:
        arch = architecture(file.read(64), str(path))
    stripped = folder / path.name
    subprocess.run([arch.binutils("strip"), "--strip-all", "-o", stripped, path], check=True)
    stripped.chmod(0o755)
    data = stripped.read_bytes()
    if len(data) > PROGRAM_MAX_BYTES:
        raise SystemExit(f"{path.name} has {len(data)} bytes when stripped, more than {PROGRAM_MAX_BYTES}")
    table = dumped(arch, "-T", stripped)
    versions: dict[tuple[int, ...], list[str]] = {}
    for version, symbol in re.findall(r"\(?GLIBC_([0-9.]+)\)?\s+(\S+)$", table, re.MULTILINE):
        versions.setdefault(tuple(map(int, version.split("."))), []).append(symbol)
    newest = max(versions, default=(2, 17))
    libraries = needed(arch, stripped)
    if foreign := libraries - SYSTEM_LIBRARIES:
        raise SystemExit(
            f"{path.name} needs libraries that not every system has: {', '.join(sorted(foreign))}"
        )
    if smallest_alignment(arch, stripped) < arch.page_max_bytes:
        raise SystemExit(f"{path.name} does not start on kernels with pages of {arch.page_max_bytes} bytes")
    symbols = tuple(versions.get(newest, []))
    return Program(path.name, stripped, data, arch, newest, symbols, libraries)


def needed(arch: Architecture, path: Path) -> frozenset[str]:
    """The shared libraries that a program names, without the loader."""
    names = re.findall(r"^\s*NEEDED\s+(\S+)$", dumped(arch, "-p", path), re.MULTILINE)
    return frozenset(name for name in names if not name.startswith("ld-linux"))


def smallest_alignment(arch: Architecture, path: Path) -> int:
    """The alignment of the segments that are loaded, in bytes."""
    exponents = re.findall(r"^\s*LOAD .* align 2\*\*(\d+)$", dumped(arch, "-p", path), re.MULTILINE)
    return min(1 << int(exponent) for exponent in exponents)


def dumped(arch: Architecture, what: str, path: Path) -> str:
    """What objdump prints of a program."""
    command = [arch.binutils("objdump"), what, path]
    return subprocess.run(command, check=True, text=True, capture_output=True).stdout


def read(path: str) -> bytes:
    """A file of the repository."""
    return (ROOT / path).read_bytes()
