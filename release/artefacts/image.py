"""The OCI image: nothing but the programs and the files of the system that they need."""

import hashlib
import io
import json
import os
import re
import shutil
import subprocess
import tarfile
from datetime import UTC, datetime
from pathlib import Path

from .archive import Tree, compress, tar
from .contents import Release, needed, read, tells
from .report import Report, Unavailable
from .source import commit, workspace
from .tools import need, which
from .trial import prove

# Unpacked.
IMAGE_MAX_BYTES = 60_000_000
USER = 65532
FOLDER = "usr/local/bin"
AUTHORITIES = "usr/share/ca-certificates/mozilla"
OCI = "application/vnd.oci.image"


def make(release: Release, report: Report) -> None:
    """Writes the image as an archive that podman, skopeo and docker load, and runs it."""
    layers = [tar(system(release), release.epoch_s), tar(programs(release), release.epoch_s)]
    size = sum(map(len, layers))
    if size > IMAGE_MAX_BYTES:
        raise SystemExit(f"the image has {size} bytes, more than {IMAGE_MAX_BYTES}")
    name = f"{release.file_stem}-linux-{release.arch.debian}.oci.tar"
    path = report.save(name, tar(layout(release, layers), release.epoch_s))
    if report.verifies:
        report.verify(path, f"{size / 1e6:.1f} MB unpacked; {run(release, path, layers)}")


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
    tree = Tree()
    for place, library in libraries(release):
        tree.file(place, library.read_bytes(), 0o755)
    for package in ("libc6", "libgcc-s1", "ca-certificates"):
        terms = Path("/usr/share/doc") / package / "copyright"
        if not terms.is_file():
            raise Unavailable(
                f"{terms} is missing: libraries and authorities are taken from Debian or its descendants"
            )
        tree.file(str(terms).lstrip("/"), terms.read_bytes())
    # Those that Debian ships, without those that this machine has added.
    certificates = sorted(Path("/", AUTHORITIES).glob("*.crt"))
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
        # Nobody can ask this loader: what the programs name is all that they need.
        folder = arch.c_library() / "lib"
        names = {name for program in release.programs for name in needed(arch, program.path)}
        loader = f"ld-linux-{arch.linux}.so.1"
        places = [(f"lib/{arch.triplet}/{name}", folder / name) for name in sorted(names)]
        return [(f"lib/{loader}", folder / loader), *places]
    for program in release.programs:
        listed = subprocess.run(["ldd", program.path], check=True, text=True, capture_output=True).stdout
        found.update(re.findall(r"(?:=> |^\s*)(/\S+)", listed, re.MULTILINE))
    return [(path.lstrip("/"), Path(path)) for path in sorted(found)]


def layout(release: Release, layers: list[bytes]) -> Tree:
    """An OCI layout, with the index that `docker load` reads beside it."""
    tree = Tree()

    def blob(kind: str, data: bytes) -> dict:
        digest = hashlib.sha256(data).hexdigest()
        tree.file(f"blobs/sha256/{digest}", data)
        return {"mediaType": f"{OCI}.{kind}", "digest": f"sha256:{digest}", "size": len(data)}

    stored = [blob("layer.v1.tar+gzip", compress(layer)) for layer in layers]
    config = blob("config.v1+json", to_json(configuration(release, layers)))
    manifest = {
        "schemaVersion": 2,
        "mediaType": f"{OCI}.manifest.v1+json",
        "config": config,
        "layers": stored,
    }
    tag = f"splitrail:{release.version}"
    pointer = blob("manifest.v1+json", to_json(manifest)) | {
        "annotations": {
            "io.containerd.image.name": f"docker.io/library/{tag}",
            "org.opencontainers.image.ref.name": release.version,
        },
        "platform": {"architecture": release.arch.debian, "os": "linux"},
    }
    tree.file(
        "index.json",
        to_json({"schemaVersion": 2, "mediaType": f"{OCI}.index.v1+json", "manifests": [pointer]}),
    )
    tree.file("oci-layout", to_json({"imageLayoutVersion": "1.0.0"}))
    config_file, *layer_files = ("blobs/" + one["digest"].replace(":", "/") for one in [config, *stored])
    docker = {"Config": config_file, "RepoTags": [tag], "Layers": layer_files}
    tree.file("manifest.json", to_json([docker]))
    return tree


def configuration(release: Release, layers: list[bytes]) -> dict:
    """How the image is run."""
    created = datetime.fromtimestamp(release.epoch_s, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    router = f"/{FOLDER}/splitrail"
    repository = workspace()["repository"]
    labels = {
        "org.opencontainers.image.title": "splitrail",
        "org.opencontainers.image.version": release.version,
        "org.opencontainers.image.licenses": workspace()["license"],
        "org.opencontainers.image.source": repository,
    }
    if commit():
        labels["org.opencontainers.image.revision"] = commit()
    config = {
        "User": f"{USER}:{USER}",
        "Env": [f"PATH=/{FOLDER}"],
        "Entrypoint": [router],
        "Cmd": ["serve", "--config", "/etc/splitrail/splitrail.yaml"],
        "ExposedPorts": {"8000/tcp": {}, "8001/tcp": {}},
        "WorkingDir": "/",
        "StopSignal": "SIGTERM",
        "Labels": labels,
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


def to_json(value: object) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


def run(release: Release, path: Path, layers: list[bytes]) -> str:
    """Runs the image with podman; where that is not possible, in a root folder of its own."""
    root = release.folder / "image"
    if not release.arch.is_native:
        unpack(layers, root)
        programs = [root / FOLDER / program.name for program in release.programs]
        commands = [release.programs[0].command(program, root) for program in programs]
        return prove(release, *commands, "not run as a container, but with the libraries of its layers")
    try:
        return run_with_podman(release, path)
    except Unavailable as reason:
        print(f"image: {reason}; its layers are unpacked and run with chroot", flush=True)
    if os.geteuid() != 0:
        raise Unavailable("not run: podman is missing, and only root can use chroot")
    unpack(layers, root)
    inside = [need("chroot", "coreutils"), f"--userspec={USER}:{USER}", root]
    commands = ([*inside, f"/{FOLDER}/{program.name}"] for program in release.programs)
    return prove(release, *commands, "not run as a container, but with chroot as user 65532")


def unpack(layers: list[bytes], root: Path) -> None:
    """Unpacks the layers into a new folder."""
    root.mkdir()
    for layer in layers:
        with tarfile.open(fileobj=io.BytesIO(layer)) as archive:
            # Another filter would take the modes of `/tmp` away.
            archive.extractall(root, filter="fully_trusted")


def run_with_podman(release: Release, path: Path) -> str:
    """Loads the image, and runs it with a read-only root as a user without rights."""
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
    loaded = subprocess.run([*base, "load", f"--input={path}"], text=True, capture_output=True)
    if loaded.returncode != 0:
        raise Unavailable(f"podman cannot load it: {loaded.stderr.strip()[-300:]}")
    image = loaded.stdout.strip().rsplit(maxsplit=1)[-1]
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
    try:
        tried = subprocess.run([*command, image, "--version"], text=True, capture_output=True)
        # 125 to 127: podman or the runtime failed, not the program.
        if tried.returncode in (125, 126, 127):
            raise Unavailable(f"podman cannot run a container here: {tried.stderr.strip()[-300:]}")
        shim = [*command, f"--entrypoint=/{FOLDER}/splitrail-shim", image]
        return prove(release, [*command, image], shim, "run by podman with a read-only root as user 65532")
    finally:
        subprocess.run([*base, "rmi", "--all", "--force"], capture_output=True)
        shutil.rmtree(storage, ignore_errors=True)
