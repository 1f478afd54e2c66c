"""The Debian package: programs, services, an example as configuration, manual pages."""

import hashlib
import os
import shutil
import subprocess
from email.utils import formatdate
from pathlib import Path

from .architecture import native
from .archive import Tree, compress
from .contents import Release, read
from .report import Report, Unavailable
from .source import workspace
from .tools import bootstrap, distribution, need
from .trial import prove

MAINTAINER = "Splitrail developers <splitrail@users.noreply.github.com>"
# Programs that need no later glibc are installed in the oldest Debian that its mirrors have; its
# updates for security are not there for all processors any more.
OLD_GLIBC, OLD_DEBIAN = (2, 28), ("oldoldstable", "http://deb.debian.org/debian")
CONFIGURATION = {
    "etc/splitrail/splitrail.yaml": "deploy/splitrail.example.yaml",
    "etc/splitrail/shim.yaml": "deploy/shim/splitrail-shim.yaml",
}
COMPLETIONS = {
    "bash": "usr/share/bash-completion/completions/PROGRAM",
    "fish": "usr/share/fish/vendor_completions.d/PROGRAM.fish",
    "zsh": "usr/share/zsh/vendor-completions/_PROGRAM",
}


def make(release: Release, report: Report) -> None:
    """Makes the package; lintian checks it, dpkg installs it, and its programs are started."""
    builder = need("dpkg-deb", "dpkg")
    tree = contents(release)
    files = release.folder / "deb"
    files.mkdir()
    files.chmod(0o755)
    Tree({**tree, **control(release, tree)}).unpack(files, release.epoch_s)
    name = f"splitrail_{release.version}-1_{release.arch.debian}.deb"
    made = release.folder / name
    environment = {**os.environ, "SOURCE_DATE_EPOCH": str(release.epoch_s)}
    command = [builder, "--root-owner-group", "-Zxz", "--build", files, made]
    subprocess.run(command, check=True, env=environment, stdout=subprocess.DEVNULL)
    path = report.save(name, made.read_bytes())
    if report.verifies:
        verify(release, report, path)


def contents(release: Release) -> Tree:
    """The files that the package installs."""
    tree = release.binaries().below("usr/bin")
    for place, source in CONFIGURATION.items():
        # They may refer to secrets; the group is set when the package is installed.
        tree.file(place, read(source), 0o640)
    tree.folder("etc/splitrail", 0o750)
    for name in ("splitrail.service", "splitrail-shim.service"):
        tree.file(f"usr/lib/systemd/system/{name}", read(f"deploy/systemd/{name}"))
    documents = Tree()
    documents.file("copyright", read("release/debian/copyright"))
    documents.file("THIRD-PARTY-LICENSES.txt.gz", compress(release.third_party.encode()))
    documents.file("changelog.gz", compress(read("CHANGELOG.md")))
    documents.file("changelog.Debian.gz", compress(changelog(release)))
    for name, bill in release.sboms.items():
        documents.file(f"sbom/{name}.gz", compress(bill))
    tree.update(documents.below("usr/share/doc/splitrail"))
    for name, entry in release.manual.items():
        tree.file(f"usr/share/man/man{name[-1]}/{name}.gz", compress(entry.data))
    tree.update(release.completions(COMPLETIONS))
    tree.file("usr/share/lintian/overrides/splitrail", read("release/debian/lintian-overrides"))
    return tree


def control(release: Release, tree: Tree) -> Tree:
    """What dpkg reads of the package."""
    info = Tree()
    size_kib = sum(-(-len(entry.data or b"") // 1024) + 1 for entry in tree.values())
    glibc = ".".join(map(str, release.glibc))
    versions = {"libc6": glibc, "libgcc-s1": "4.2"}
    libraries = ", ".join(f"{package} (>= {versions[package]})" for package in release.packages)
    info.file(
        "control",
        f"""\
Package: splitrail
Version: {release.version}-1
Architecture: {release.arch.debian}
Maintainer: {MAINTAINER}
Installed-Size: {size_kib}
Depends: adduser, init-system-helpers (>= 1.54), {libraries}
Recommends: ca-certificates
Section: net
Priority: optional
Homepage: {workspace()["repository"]}
Description: router for LLM clusters with disaggregated prefill and decode
 Splitrail accepts OpenAI, Anthropic and gRPC requests, knows which worker
 holds which KV blocks, and decides for each request where its prompt is
 computed and where its tokens are generated.
 .
 The package has the router with its tools (splitrail) and the optional shim
 that runs beside an engine (splitrail-shim), each with a systemd service that
 is not started before you enable it.
""",
    )
    info.file("conffiles", "".join(f"/{place}\n" for place in sorted(CONFIGURATION)))
    sums = [
        (path, hashlib.md5(entry.data).hexdigest())
        for path, entry in sorted(tree.items())
        if entry.data is not None
    ]
    info.file("md5sums", "".join(f"{md5}  {path}\n" for path, md5 in sums if path not in CONFIGURATION))
    for script in ("postinst", "prerm", "postrm"):
        info.file(script, read(f"release/debian/{script}"), 0o755)
    return info.below("DEBIAN")


def changelog(release: Release) -> bytes:
    """The changelog in Debian's form."""
    date = formatdate(release.epoch_s)
    head = f"splitrail ({release.version}-1) stable; urgency=medium"
    return f"{head}\n\n  * See changelog.gz.\n\n -- {MAINTAINER}  {date}\n".encode()


def verify(release: Release, report: Report, path: Path) -> None:
    """Has lintian look for errors, installs the package in a new system, and starts it there."""
    lintian = need("lintian", "lintian")
    done = subprocess.run(
        [lintian, "--allow-root", "--fail-on", "error", path], text=True, capture_output=True
    )
    if done.returncode != 0:
        raise SystemExit(f"lintian: {done.stdout}{done.stderr}")
    print(done.stdout, end="")
    report.verify(path, "lintian finds no error")
    if os.geteuid() != 0:
        raise Unavailable("not installed, because only root can install it in a new system")
    system = new_system(release)
    shutil.copy(path, system / "tmp" / path.name)
    inside = [need("chroot", "coreutils"), system]
    subprocess.run([*inside, "dpkg", "--install", f"/tmp/{path.name}"], check=True, stdout=subprocess.DEVNULL)
    owner = subprocess.run(
        [*inside, "stat", "--format=%U:%G %a", *(f"/{one}" for one in CONFIGURATION)],
        check=True,
        text=True,
        capture_output=True,
    )
    if owner.stdout.split("\n")[:-1] != ["root:splitrail 640"] * len(CONFIGURATION):
        raise SystemExit(f"the configuration belongs to {owner.stdout}")
    user = [need("chroot", "coreutils"), "--userspec=splitrail:splitrail", system]
    if not release.arch.is_native:
        shutil.copy(release.arch.qemu(), system / "qemu")
        user.append("/qemu")
    how = f"installed with dpkg in a new {distribution(system)}, in a chroot, and started as its user"
    how = prove(release, *([*user, f"/usr/bin/{program.name}"] for program in release.programs), how)
    subprocess.run([*inside, "dpkg", "--purge", "splitrail"], check=True, stdout=subprocess.DEVNULL)
    left = [place for place in ("etc/splitrail", "usr/bin/splitrail") if (system / place).exists()]
    if left:
        raise SystemExit(f"the removed package leaves {left}")
    report.verify(path, f"{how}; purged, without a program or a configuration left")


def new_system(release: Release) -> Path:
    """The folder of a new Debian in which the package can be installed."""
    processors = dict.fromkeys([native().debian, release.arch.debian])
    libraries = (f"{name}:{release.arch.debian}" for name in release.packages)
    options = [
        "--mode=root",
        "--variant=apt",
        f"--architectures={','.join(processors)}",
        f"--include={','.join(['adduser', *libraries])}",
    ]
    system = release.folder / "old-system"
    if release.glibc <= OLD_GLIBC:
        try:
            bootstrap(system, *options, suite=OLD_DEBIAN)
        except Unavailable as error:
            print(f"deb: {error}; it is installed in the release that this machine has", flush=True)
        else:
            return system
    system = release.folder / "system"
    bootstrap(system, *options)
    return system
