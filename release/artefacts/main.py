"""The command line: which artefacts, from which programs, and what came of it."""

import argparse
import hashlib
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

from . import deb, image, image_index, sbom, source, tarball, tools, wheel
from .contents import NAMES, Release
from .report import Report, Unavailable
from .source import ROOT, host

ARTEFACTS = {
    "tarball": tarball.make,
    "sbom": sbom.make,
    "wheel": wheel.make,
    "deb": deb.make,
    "image": image.make,
}
# What is published, as `release/build --target` names it.
PUBLISHED = ("x86_64-unknown-linux-gnu.2.28", "aarch64-unknown-linux-gnu.2.28")
# Exit status if an artefact was not made, or not verified.
INCOMPLETE = 3


def main() -> int:
    args = parse()
    names = list(dict.fromkeys(args.artefact)) or list(ARTEFACTS)
    if args.plain:
        source.FEATURES.clear()
    tools.installs = args.install
    programs = args.programs or [build(target, args) for target in targets(args)]
    output = args.output.resolve()
    output.parent.mkdir(parents=True, exist_ok=True)
    with (
        tempfile.TemporaryDirectory(prefix="splitrail-package-") as temporary,
        tempfile.TemporaryDirectory(prefix=f".{output.name}-", dir=output.parent) as unfinished,
    ):
        # What an earlier run has made stays until all of this run is there.
        made = Path(unfinished) / output.name
        made.mkdir()
        release_list = releases(programs, Path(temporary), args.plain)
        report = Report(made, release_list, verifies=not args.no_verify)
        for release in report.releases:
            for name in names:
                attempt(f"{name} for {release.arch.linux}", report, ARTEFACTS[name], release)
        if "image" in names and len(report.releases) > 1:
            attempt("image for all processors", report, image_index.make, report.releases)
        (made / "SHA256SUMS").write_text(checksums(made))
        report.write(output, PUBLISHED)
        shutil.rmtree(output, ignore_errors=True)
        made.rename(output)
    return INCOMPLETE if report.missing else 0


def releases(programs: list[Path], temporary: Path, plain: bool) -> list[Release]:
    """The programs of all folders, each of which is for another processor."""
    found: dict[str, Release] = {}
    for number, folder in enumerate(programs):
        work = temporary / str(number)
        work.mkdir()
        release = Release(folder.resolve(), work, plain)
        if release.arch.linux in found:
            raise SystemExit(f"two folders have programs for {release.arch.linux}: package them separately")
        found[release.arch.linux] = release
    return list(found.values())


def attempt(what: str, report: Report, make: Callable[..., None], programs: Release | list[Release]) -> None:
    """Makes an artefact of programs, or reports why this machine cannot make or verify it."""
    print(f"--- {what}", flush=True)
    try:
        make(programs, report)
    except Unavailable as error:
        report.incomplete(what, str(error))


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
        help=f"what release/build builds; repeatable (default: {' and '.join(PUBLISHED)})",
    )
    parser.add_argument(
        "--host", action="store_true", help="builds for this machine and its glibc alone, without Zig"
    )
    parser.add_argument(
        "--plain",
        action="store_true",
        help="takes programs without the optional features, and builds them for this machine with "
        "`cargo build --release`: to try them",
    )
    parser.add_argument(
        "--without-profile", action="store_true", help="builds without running the programs first"
    )
    parser.add_argument(
        "--output",
        type=Path,
        metavar="FOLDER",
        default=ROOT / "target/package",
        help="is replaced at the end (default: target/package)",
    )
    parser.add_argument(
        "--install",
        action="store_true",
        help="installs Debian's packages that are missing with apt, as root; without it, an artefact "
        "that needs one is reported as incomplete",
    )
    parser.add_argument("--no-verify", action="store_true", help="starts nothing and checks nothing")
    args = parser.parse_args()
    if args.programs and (args.target or args.host or args.without_profile):
        parser.error("--programs names what was built: no other option for the build goes with it")
    if bool(args.target) + args.host + args.plain > 1:
        parser.error("--host, --plain and --target exclude each other")
    if args.plain and args.without_profile:
        parser.error("the plain build has no profile: leave out --without-profile")
    for name in args.artefact:
        if name not in ARTEFACTS:
            parser.error(f"there is no artefact {name!r}: choose from {', '.join(ARTEFACTS)}")
    if args.output.exists() and any(args.output.iterdir()) and not (args.output / "SHA256SUMS").exists():
        parser.error(f"{args.output} has files that are not of an earlier run: name another folder")
    return args


def targets(args: argparse.Namespace) -> list[str | None]:
    """What is built; nothing stands for this machine."""
    return [None] if args.host or args.plain else args.target or list(PUBLISHED)


def build(target: str | None, args: argparse.Namespace) -> Path:
    """Builds the programs; the folder that they are in."""
    if args.plain:
        names = [option for name in NAMES for option in ("--package", name, "--bin", name)]
        subprocess.run(["cargo", "build", "--release", "--locked", *names], cwd=ROOT, check=True)
        return ROOT / "target/release"
    command = [ROOT / "release/build"]
    if args.without_profile:
        command.append("--without-profile")
    folder = ROOT / "target/dist-build"
    if target is None:
        name = host()
    else:
        command += ["--target", target]
        name, glibc = target.split(".", 1)
        folder /= f"glibc-{glibc}"
    subprocess.run(command, check=True)
    return folder / name / "dist"


def checksums(output: Path) -> str:
    files = sorted(file for file in output.iterdir() if file.name != "SHA256SUMS")
    return "".join(f"{hashlib.sha256(file.read_bytes()).hexdigest()}  {file.name}\n" for file in files)
