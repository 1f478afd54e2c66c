"""Processors: their names, and how programs for another one are read and started."""

import functools
import platform
from dataclasses import dataclass
from pathlib import Path

from .tools import need, need_file


@dataclass(frozen=True)
class Architecture:
    """The names of a processor: Linux, Debian and OCI, Rust."""

    linux: str
    debian: str
    target: str

    @property
    def is_native(self) -> bool:
        """Whether this machine has such a processor."""
        return self.linux == platform.machine()

    @property
    def triplet(self) -> str:
        """The name in Debian's paths and packages."""
        return f"{self.linux}-linux-gnu"

    @property
    def root(self) -> Path:
        """The folder with the C library, below which are those for another processor."""
        return Path("/") if self.is_native else Path("/usr", self.triplet)

    def binutils(self, command: str) -> str:
        """A command of binutils that reads the programs."""
        if self.is_native:
            return command
        package = f"binutils-{self.triplet.replace('_', '-')}"
        return need(f"{self.triplet}-{command}", package)

    def emulator(self, root: Path | None = None) -> list[str]:
        """What starts a program with the C library below a folder: nothing on such a machine."""
        if self.is_native:
            return []
        qemu = need(f"qemu-{self.linux}", "qemu-user")
        return [qemu, "-L", str(root or self.c_library())]

    @functools.cache
    def c_library(self) -> Path:
        """The folder below which the libraries are; they are installed if they are missing."""
        packages = [f"{name}-{self.debian}-cross" for name in ("libc6", "libgcc-s1")]
        if not self.is_native:
            for name in ("libc.so.6", "libgcc_s.so.1"):
                need_file(self.root / "lib" / name, *packages)
        return self.root

    def how(self) -> str:
        """How programs are started, for reports."""
        return "" if self.is_native else " under qemu, an emulator"


# By `e_machine` of the ELF header.
ARCHITECTURES = {
    62: Architecture("x86_64", "amd64", "x86_64-unknown-linux-gnu"),
    183: Architecture("aarch64", "arm64", "aarch64-unknown-linux-gnu"),
}


def architecture(elf: bytes, name: str) -> Architecture:
    """The processor that a program is for."""
    found = ARCHITECTURES.get(int.from_bytes(elf[18:20], "little"))
    if elf[:4] != b"\x7fELF" or found is None:
        known = ", ".join(one.linux for one in ARCHITECTURES.values())
        raise SystemExit(f"{name} is not a program for Linux on one of: {known}")
    return found
