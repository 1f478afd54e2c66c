"""Processors: their names, and how programs for another one are read and started."""

import atexit
import functools
import platform
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

from .tools import bootstrap, need


@dataclass(frozen=True)
class Architecture:
    """The names of a processor: Linux, Debian and OCI, Rust; and the path of its loader of programs."""

    linux: str
    debian: str
    target: str
    loader: str
    # Of memory, the largest that kernels for it use.
    page_max_bytes: int

    @property
    def is_native(self) -> bool:
        """Whether this machine has such a processor."""
        return self.linux == platform.machine()

    @property
    def triplet(self) -> str:
        """The name in Debian's paths and packages."""
        return f"{self.linux}-linux-gnu"

    def binutils(self, command: str) -> str:
        """A command of binutils that reads the programs."""
        if self.is_native:
            return command
        package = f"binutils-{self.triplet.replace('_', '-')}"
        return need(f"{self.triplet}-{command}", package)

    def qemu(self) -> str:
        """The emulator, which needs no library."""
        return need(f"qemu-{self.linux}-static", "qemu-user-static")

    def emulator(self, root: Path | None = None) -> list[str]:
        """What starts a program with the C library below a folder: nothing on such a machine."""
        if self.is_native:
            return []
        return [self.qemu(), "-L", str(root or self.root())]

    @functools.cache
    def root(self) -> Path:
        """The folder with the C library; that for another processor is unpacked from packages of Debian."""
        if self.is_native:
            return Path("/")
        folder = Path(tempfile.mkdtemp(prefix=f"splitrail-{self.debian}-"))
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        root = folder / "root"
        bootstrap(
            root,
            "--variant=extract",
            f"--architectures={self.debian}",
            "--include=libc6,libgcc-s1,ca-certificates",
        )
        return root

    def how(self) -> str:
        """How programs are started, for reports."""
        return "" if self.is_native else " under qemu, an emulator"


# By `e_machine` of the ELF header.
ARCHITECTURES = {
    62: Architecture("x86_64", "amd64", "x86_64-unknown-linux-gnu", "lib64/ld-linux-x86-64.so.2", 4096),
    183: Architecture("aarch64", "arm64", "aarch64-unknown-linux-gnu", "lib/ld-linux-aarch64.so.1", 65536),
}


def architecture(elf: bytes, name: str) -> Architecture:
    """The processor that a program is for."""
    found = ARCHITECTURES.get(int.from_bytes(elf[18:20], "little"))
    if elf[:4] != b"\x7fELF" or found is None:
        known = ", ".join(one.linux for one in ARCHITECTURES.values())
        raise SystemExit(f"{name} is not a program for Linux on one of: {known}")
    return found


def native() -> Architecture:
    """That of this machine."""
    return next(one for one in ARCHITECTURES.values() if one.is_native)
