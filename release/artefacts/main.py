"""The command line: which artefacts, from which programs, and what came of it."""

import argparse
import hashlib
import shutil
import subprocess
import tempfile
from pathlib import Path

from . import deb, image, sbom, tarball, wheel
from .contents import Release
from .report import Report, Unavailable
from .source import ROOT, host

ARTEFACTS = {
    "tarball": tarball.make,
    "sbom": sbom.make,
    "wheel": wheel.make,
    "deb": deb.make,
    "image": image.make,
}
# Exit status if an artefact was not made, or not verified.
INCOMPLETE = 3


def main() -> int:
    args = parse()
    names = list(dict.fromkeys(args.artefact)) or list(ARTEFACTS)
    targets = args.target or [None]
    programs = args.programs or [build(target) for target in targets]
    output = args.output.resolve()
    shutil.rmtree(output, ignore_errors=True)
    output.mkdir(parents=True)
    # Also after a run that fails, the folder is known as one of this script.
    sums = output / "SHA256SUMS"
    sums.touch()
    report = Report(output, verifies=not args.no_verify)
    for folder in programs:
        with tempfile.TemporaryDirectory(prefix="splitrail-package-") as temporary:
            package(folder.resolve(), Path(temporary), names, report)
    sums.write_text(checksums(output))
    report.write()
    return INCOMPLETE if report.missing else 0


def package(programs: Path, temporary: Path, names: list[str], report: Report) -> None:
    """Makes the artefacts of the programs in one folder."""
    release = Release(programs, temporary)
    report.releases.append(release)
    for name in names:
        print(f"--- {name} for {release.arch.linux}", flush=True)
        try:
            ARTEFACTS[name](release, report)
        except Unavailable as error:
            report.incomplete(f"{name} for {release.arch.linux}", str(error))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="release/package",
        description="Makes the artefacts that are published, and starts each of them.",
        epilog="Exit status: 0 if every artefact was made and verified, 3 if not (the output "
        "says which, and why), another one after an error.",
    )
    parser.add_argument(
        "artefact", nargs="*", metavar="ARTEFACT", help=f"one of: {', '.join(ARTEFACTS)} (default: all)"
    )
    parser.add_argument(
        "--programs",
        type=Path,
        action="append",
        metavar="FOLDER",
        help="has `splitrail` and `splitrail-shim`, built with all features; repeatable, once for each "
        "processor; without it, release/build builds them",
    )
    parser.add_argument(
        "--target",
        action="append",
        metavar="TARGET.GLIBC",
        help="what release/build builds, for example aarch64-unknown-linux-gnu.2.28; repeatable "
        "(default: for this machine)",
    )
    parser.add_argument(
        "--output",
        type=Path,
        metavar="FOLDER",
        default=ROOT / "target/package",
        help="is emptied first (default: target/package)",
    )
    parser.add_argument("--no-verify", action="store_true", help="starts nothing and checks nothing")
    args = parser.parse_args()
    if args.programs and args.target:
        parser.error("--target is for release/build, and --programs names what was built: give one of them")
    for name in args.artefact:
        if name not in ARTEFACTS:
            parser.error(f"there is no artefact {name!r}: choose from {', '.join(ARTEFACTS)}")
    if args.output.exists() and any(args.output.iterdir()) and not (args.output / "SHA256SUMS").exists():
        parser.error(f"{args.output} has files that are not of an earlier run: name another folder")
    return args


def build(target: str | None) -> Path:
    """Builds the programs, for a target if not for this machine; the folder that they are in."""
    subprocess.run([ROOT / "release/build", *(["--target", target] if target else [])], check=True)
    folder = ROOT / "target/dist-build"
    if target is None:
        return folder / host() / "dist"
    name, glibc = target.split(".", 1)
    return folder / f"glibc-{glibc}" / name / "dist"


def checksums(output: Path) -> str:
    files = sorted(file for file in output.iterdir() if file.name != "SHA256SUMS")
    return "".join(f"{hashlib.sha256(file.read_bytes()).hexdigest()}  {file.name}\n" for file in files)
