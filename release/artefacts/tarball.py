"""`splitrail-VERSION-TARGET.tar.gz`: the programs with all that goes with them."""

import tarfile

from .archive import Tree, compress, tar
from .contents import Release, read
from .report import Report
from .trial import prove


def make(release: Release, report: Report) -> None:
    """Makes the archive, and starts what is in it."""
    folder = f"{release.file_stem}-{release.arch.target}"
    path = report.save(f"{folder}.tar.gz", compress(tar(contents(release).below(folder), release.epoch_s)))
    if report.verifies:
        place = release.folder / "tarball"
        with tarfile.open(path) as archive:
            archive.extractall(place, filter="data")
        commands = [program.command(place / folder / program.name) for program in release.programs]
        report.verify(path, prove(release, *commands))


def contents(release: Release) -> Tree:
    """What is in the archive's folder."""
    tree = release.binaries()
    for name in ("LICENSE", "README.md", "CHANGELOG.md"):
        tree.file(name, read(name))
    tree.file("THIRD-PARTY-LICENSES.txt", release.third_party)
    tree.file("splitrail.example.yaml", read("deploy/splitrail.example.yaml"))
    tree.file("splitrail-shim.example.yaml", read("deploy/shim/splitrail-shim.yaml"))
    for name in ("splitrail.service", "splitrail-shim.service"):
        tree.file(f"systemd/{name}", read(f"deploy/systemd/{name}"))
    for name, bill in release.sboms.items():
        tree.file(f"sbom/{name}", bill)
    tree.update(release.manual.below("man"))
    shells = ("bash", "fish", "zsh")
    tree.update(release.completions({shell: f"completions/PROGRAM.{shell}" for shell in shells}))
    return tree
