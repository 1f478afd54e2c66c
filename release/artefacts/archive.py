"""Archives whose bytes depend on nothing but the files: sorted, one time, one owner."""

import gzip
import io
import os
import tarfile
import time
import zipfile
from dataclasses import dataclass
from pathlib import Path, PurePosixPath


@dataclass(frozen=True)
class Entry:
    """A file, or a folder if it has no data."""

    data: bytes | None
    mode: int


class Tree(dict[str, Entry]):
    """Files and folders by their relative path. Missing parent folders get mode 755."""

    def file(self, path: str, data: bytes | str, mode: int = 0o644) -> None:
        """Adds a file."""
        self[path] = Entry(data.encode() if isinstance(data, str) else data, mode)

    def folder(self, path: str, mode: int = 0o755) -> None:
        """Adds a folder."""
        self[path] = Entry(None, mode)

    def complete(self) -> list[tuple[str, Entry]]:
        """All entries with all parent folders, sorted."""
        whole = dict(self)
        for path in self:
            for parent in PurePosixPath(path).parents:
                if str(parent) != ".":
                    whole.setdefault(str(parent), Entry(None, 0o755))
        return sorted(whole.items())

    def below(self, folder: str) -> "Tree":
        """The same entries in a folder."""
        return Tree({f"{folder}/{path}": entry for path, entry in self.items()})

    def unpack(self, folder: Path, epoch_s: int | None = None) -> None:
        """Writes everything into an existing folder."""
        for path, entry in self.complete():
            place = folder / path
            if entry.data is None:
                place.mkdir()
            else:
                place.write_bytes(entry.data)
            place.chmod(entry.mode)
        if epoch_s is not None:
            for path, _ in self.complete():
                os.utime(folder / path, (epoch_s, epoch_s))


def tar(tree: Tree, epoch_s: int) -> bytes:
    """An uncompressed tar archive, owned by root."""
    output = io.BytesIO()
    with tarfile.open(fileobj=output, mode="w", format=tarfile.USTAR_FORMAT) as archive:
        for path, entry in tree.complete():
            info = tarfile.TarInfo(path)
            info.mode, info.mtime = entry.mode, epoch_s
            info.uname = info.gname = "root"
            if entry.data is None:
                info.type = tarfile.DIRTYPE
                archive.addfile(info)
            else:
                info.size = len(entry.data)
                archive.addfile(info, io.BytesIO(entry.data))
    return output.getvalue()


def compress(data: bytes) -> bytes:
    """Gzip without a time or a name."""
    return gzip.compress(data, mtime=0)


def zipped(tree: Tree, epoch_s: int) -> bytes:
    """A zip archive of the files, in the order of the tree."""
    output = io.BytesIO()
    with zipfile.ZipFile(output, "w", zipfile.ZIP_DEFLATED) as archive:
        for path, entry in tree.items():
            info = zipfile.ZipInfo(path, time.gmtime(epoch_s)[:6])
            info.compress_type = zipfile.ZIP_DEFLATED
            info.create_system = 3  # Unix: the upper half of the attributes is the mode.
            info.external_attr = (0o100000 | entry.mode) << 16
            archive.writestr(info, entry.data or b"")
    return output.getvalue()
