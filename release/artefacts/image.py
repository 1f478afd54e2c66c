"""The OCI image: nothing but the programs and the files of the system that they need."""

import hashlib
import io
import os
import re
import subprocess
import tarfile
from datetime import UTC, datetime
from pathlib import Path

from . import oci, podman
from .archive import Tree, compress, tar
from .contents import Release, read, tells
from .oci import FOLDER, USER
from .report import Report, Unavailable
from .source import commit, workspace
from .tools import need
from .trial import prove

# Unpacked.
IMAGE_MAX_BYTES = 60_000_000
AUTHORITIES = "usr/share/ca-certificates/mozilla"


def make(release: Release, report: Report) -> None:
    """Writes the image as an archive that podman, skopeo and docker load, and runs it."""
    layers = [tar(system(release), release.epoch_s), tar(programs(release), release.epoch_s)]
    size = sum(map(len, layers))
    if size > IMAGE_MAX_BYTES:
        raise SystemExit(f"the image has {size} bytes, more than {IMAGE_MAX_BYTES}")
    path = report.save(file_name(release), tar(layout(release, layers), release.epoch_s))
    if report.verifies:
        report.verify(path, f"{size / 1e6:.1f} MB unpacked; {run(release, path, layers)}")


def file_name(release: Release) -> str:
    """The archive of the image for one processor."""
    return f"{release.file_stem}-linux-{release.arch.debian}.oci.tar"


def programs(release: Release) -> Tree:
    """The layer that differs between releases."""
    tree = release.binaries().below(FOLDER)
    documents = Tree()
    documents.file("LICENSE", read("LICENSE"))
    documents.file("THIRD-PARTY-LICENSES.txt", release.third_party)
    for name, bill in release.sboms.items():
        documents.file(f"sbom/{name}", bill)
    tree.update(documents.below("usr/share/doc/splitrail"))
    return tree


def system(release: Release) -> Tree:
    """The C library of this system, authorities, a user, and a folder for temporary files."""
    tree, root = Tree(), release.arch.root()
    for place, library in libraries(release):
        tree.file(place, library.read_bytes(), 0o755)
    for package in (*release.packages, "ca-certificates"):
        place = f"usr/share/doc/{package}/copyright"
        terms = root / place
        if not terms.is_file():
            raise Unavailable(
                f"{terms} is missing: libraries and authorities are taken from Debian or its descendants"
            )
        tree.file(place, terms.read_bytes())
    # Those that Debian ships, without those that this machine has added.
    certificates = sorted((root / AUTHORITIES).glob("*.crt"))
    if not certificates:
        raise Unavailable("no certificates of authorities: install ca-certificates")
    tree.file("etc/ssl/certs/ca-certificates.crt", b"".join(file.read_bytes() for file in certificates))
    tree.file(
        "etc/passwd",
        f"root:x:0:0:root:/:/sbin/nologin\nsplitrail:x:{USER}:{USER}:Splitrail:/:/sbin/nologin\n",
    )
    tree.file("etc/group", f"root:x:0:\nsplitrail:x:{USER}:\n")
    tree.file("etc/nsswitch.conf", "hosts: files dns\n")
    tree.folder("etc/splitrail")
    tree.folder("tmp", 0o1777)
    return tree


def libraries(release: Release) -> list[tuple[str, Path]]:
    """The loader and the libraries of the programs, by the path at which they are looked up."""
    found = set()
    arch = release.arch
    if not arch.is_native:
        # This loader cannot be asked: what the programs name is all that they need.
        folder = f"lib/{arch.triplet}"
        places = [(arch.loader, arch.root() / folder / Path(arch.loader).name)]
        return places + [
            (f"{folder}/{name}", arch.root() / folder / name) for name in sorted(release.libraries)
        ]
    for program in release.programs:
        listed = subprocess.run(["ldd", program.path], check=True, text=True, capture_output=True).stdout
        found.update(re.findall(r"(?:=> |^\s*)(/\S+)", listed, re.MULTILINE))
    return [(path.lstrip("/"), Path(path)) for path in sorted(found)]


def layout(release: Release, layers: list[bytes]) -> oci.Layout:
    """An OCI layout, with the index that `docker load` reads beside it."""
    tree = oci.Layout()
    stored = [tree.part("layer.v1.tar+gzip", compress(layer)) for layer in layers]
    config = tree.part("config.v1+json", oci.to_json(configuration(release, layers)))
    manifest = {
        "schemaVersion": 2,
        "mediaType": f"{oci.TYPE}.manifest.v1+json",
        "config": config,
        "layers": stored,
    }
    platform = {"architecture": release.arch.debian, "os": "linux"}
    pointer = tree.part("manifest.v1+json", oci.to_json(manifest)) | {"platform": platform}
    tree.publish(pointer, release.version)
    config_file, *layer_files = map(oci.path, [config, *stored])
    docker = {"Config": config_file, "RepoTags": [f"splitrail:{release.version}"], "Layers": layer_files}
    tree.file("manifest.json", oci.to_json([docker]))
    return tree


def labels() -> dict[str, str]:
    """What registries show of an image."""
    known = {
        "org.opencontainers.image.title": "splitrail",
        "org.opencontainers.image.version": workspace()["version"],
        "org.opencontainers.image.licenses": workspace()["license"],
        "org.opencontainers.image.source": workspace()["repository"],
    }
    if commit():
        known["org.opencontainers.image.revision"] = commit()
    return known


def configuration(release: Release, layers: list[bytes]) -> dict:
    """How the image is run."""
    created = datetime.fromtimestamp(release.epoch_s, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    router = f"/{FOLDER}/splitrail"
    config = {
        "User": f"{USER}:{USER}",
        "Env": [f"PATH=/{FOLDER}"],
        "Entrypoint": [router],
        "Cmd": ["serve", "--config", "/etc/splitrail/splitrail.yaml"],
        "ExposedPorts": {"8000/tcp": {}, "8001/tcp": {}},
        "WorkingDir": "/",
        "StopSignal": "SIGTERM",
        "Labels": labels(),
    }
    if tells(release.programs[0], "health", "--help") is not None:
        # Not part of OCI: docker and podman read it, Kubernetes has probes of its own.
        second = 1_000_000_000
        config["Healthcheck"] = {
            "Test": ["CMD", router, "health"],
            "Interval": 10 * second,
            "Timeout": 10 * second,
            "Retries": 3,
        }
    return {
        "created": created,
        "architecture": release.arch.debian,
        "os": "linux",
        "config": config,
        "rootfs": {
            "type": "layers",
            "diff_ids": [f"sha256:{hashlib.sha256(layer).hexdigest()}" for layer in layers],
        },
        "history": [
            {"created": created, "created_by": "release/package: libraries, authorities, user"},
            {"created": created, "created_by": "release/package: programs"},
        ],
    }


def run(release: Release, path: Path, layers: list[bytes]) -> str:
    """Runs the image with podman; where that is not possible, in a root folder of its own."""
    try:
        return podman.run(release, ["load", f"--input={path}"])
    except Unavailable as reason:
        print(f"image: {reason}; its layers are unpacked and run without podman", flush=True)
    root = release.folder / "image"
    unpack(layers, root)
    paths = [f"{FOLDER}/{program.name}" for program in release.programs]
    if not release.arch.is_native:
        commands = [[*release.arch.emulator(root), root / path] for path in paths]
        return prove(release, *commands, "not run as a container, but with the libraries of its layers")
    if os.geteuid() != 0:
        raise Unavailable("not run: podman is missing, and only root can use chroot")
    inside = [need("chroot", "coreutils"), f"--userspec={USER}:{USER}", root]
    commands = ([*inside, f"/{path}"] for path in paths)
    return prove(release, *commands, f"not run as a container, but with chroot as user {USER}")


def unpack(layers: list[bytes], root: Path) -> None:
    """Unpacks the layers into a new folder."""
    root.mkdir()
    for layer in layers:
        with tarfile.open(fileobj=io.BytesIO(layer)) as archive:
            # Another filter would take the modes of `/tmp` away.
            archive.extractall(root, filter="fully_trusted")
