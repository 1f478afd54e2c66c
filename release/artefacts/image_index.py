"""The image for all processors: one archive with an index, from which registries take all images."""

import gzip
import hashlib
import io
import json
import tarfile
from pathlib import Path

from . import image, oci, podman
from .architecture import architecture
from .archive import tar
from .contents import NAMES, Release
from .report import Report, Unavailable


def make(releases: list[Release], report: Report) -> None:
    """Writes the archive, reads it again, and runs each image that it has."""
    first = releases[0]
    images = [report.output / image.file_name(release) for release in releases]
    if missing := [one.name for one in images if not one.exists()]:
        raise Unavailable(f"not made without {', '.join(missing)}")
    path = report.save(f"{first.file_stem}-linux.oci.tar", tar(layout(images, first.version), first.epoch_s))
    if not report.verifies:
        return
    expected = [release.arch.debian for release in releases]
    found = processors(files(path))
    if found != expected:
        raise SystemExit(f"{path.name} has images for {found}, not for {expected}")
    report.verify(path, f"all digests are right, and its programs are for {' and '.join(found)}")
    for release in releases:
        how = podman.run(release, ["pull", f"--arch={release.arch.debian}", f"oci-archive:{path}"])
        report.verify(path, f"{release.arch.debian}: {how}")


def layout(images: list[Path], version: str) -> oci.Layout:
    """The parts of all images, below an index of them."""
    tree, pointers = oci.Layout(), []
    for one in images:
        parts = files(one)
        for name, data in parts.items():
            if name.startswith("blobs/"):
                tree.file(name, data)
        pointer = json.loads(parts["index.json"])["manifests"][0]
        # It has the name of this image alone.
        del pointer["annotations"]
        pointers.append(pointer)
    # Registries show what an index says of itself.
    whole = tree.part("index.v1+json", oci.index(pointers, annotations=image.labels()))
    tree.publish(whole, version)
    return tree


def files(path: Path) -> dict[str, bytes]:
    """The files of an archive by their names."""
    with tarfile.open(path) as archive:
        return {one.name: archive.extractfile(one).read() for one in archive if one.isfile()}


def processors(parts: dict[str, bytes]) -> list[str]:
    """Follows the index to all programs, and returns the processors that they are for."""

    def part(pointer: dict) -> bytes:
        data = parts[oci.path(pointer)]
        check(pointer["size"] == len(data), f"the size of {pointer['digest']}")
        check(pointer["digest"] == digest(data), f"the digest of {pointer['digest']}")
        return data

    found = []
    [whole] = json.loads(parts["index.json"])["manifests"]
    for pointer in json.loads(part(whole))["manifests"]:
        manifest = json.loads(part(pointer))
        config = json.loads(part(manifest["config"]))
        layers = [gzip.decompress(part(layer)) for layer in manifest["layers"]]
        check(config["rootfs"]["diff_ids"] == [digest(layer) for layer in layers], "the digest of a layer")
        processor = pointer["platform"]["architecture"]
        check(config["architecture"] == processor, f"what the image for {processor} says of itself")
        for name in NAMES:
            check(program(layers, name) == processor, f"the processor of {name} for {processor}")
        found.append(processor)
    return found


def program(layers: list[bytes], name: str) -> str:
    """The processor that a program of an image is for."""
    with tarfile.open(fileobj=io.BytesIO(layers[-1])) as archive:
        return architecture(archive.extractfile(f"{oci.FOLDER}/{name}").read(64), name).debian


def digest(data: bytes) -> str:
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


def check(holds: bool, what: str) -> None:
    if not holds:
        raise SystemExit(f"the index of images is wrong: {what}")
