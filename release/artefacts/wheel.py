"""The Python wheel: `pip install` puts both programs on the path."""

import base64
import hashlib
import subprocess
import sys

from .archive import Tree, zipped
from .contents import Release, read
from .report import Report
from .source import workspace
from .trial import prove

SUMMARY = "A router for LLM clusters with disaggregated prefill and decode"


def make(release: Release, report: Report) -> None:
    """Makes the wheel, and starts what pip has installed."""
    major, minor = release.glibc[:2]
    tag = f"py3-none-manylinux_{major}_{minor}_{release.arch.linux}"
    path = report.save(f"{release.file_stem}-{tag}.whl", zipped(contents(release, tag), release.epoch_s))
    if report.verifies:
        place = release.folder / "venv"
        subprocess.run([sys.executable, "-m", "venv", place], check=True)
        pip = [place / "bin/pip", "install", "--quiet", "--no-index", "--disable-pip-version-check"]
        how = "installed with pip in a new environment"
        if not release.arch.is_native:
            platform = tag.removeprefix("py3-none-")
            pip += [f"--platform={platform}", "--only-binary=:all:", f"--target={place}/foreign"]
            place /= "foreign"
            how = f"installed with pip for {platform}"
        subprocess.run([*pip, path], check=True)
        commands = [program.command(place / "bin" / program.name) for program in release.programs]
        report.verify(path, prove(release, *commands, how))


def contents(release: Release, tag: str) -> Tree:
    """The files of the wheel; the list of all of them (`RECORD`) is the last one."""
    name = release.file_stem
    tree = release.binaries().below(f"{name}.data/scripts")
    info = Tree()
    for bill, data in release.sboms.items():
        info.file(f"sboms/{bill}", data)
    info.file("licenses/LICENSE", read("LICENSE"))
    info.file("licenses/THIRD-PARTY-LICENSES.txt", release.third_party)
    info.file("METADATA", metadata(release))
    info.file(
        "WHEEL",
        f"Wheel-Version: 1.0\nGenerator: splitrail {release.version}\nRoot-Is-Purelib: false\nTag: {tag}\n",
    )
    tree.update(sorted(info.below(f"{name}.dist-info").items()))
    record = f"{name}.dist-info/RECORD"
    lines = [f"{path},sha256={digest(entry.data)},{len(entry.data)}\n" for path, entry in tree.items()]
    tree.file(record, "".join(lines) + f"{record},,\n")
    return tree


def metadata(release: Release) -> str:
    """What package indexes show."""
    repository = workspace()["repository"]
    return (
        f"""\
Metadata-Version: 2.4
Name: splitrail
Version: {release.version}
Summary: {SUMMARY}
License-Expression: {workspace()["license"]}
License-File: LICENSE
License-File: THIRD-PARTY-LICENSES.txt
Requires-Python: >=3.8
Keywords: llm,router,vllm,sglang,kv-cache,inference
Classifier: Environment :: Console
Classifier: Operating System :: POSIX :: Linux
Classifier: Programming Language :: Rust
Project-URL: Source, {repository}
Project-URL: Changelog, {repository}/blob/main/CHANGELOG.md
Project-URL: Documentation, {repository}/blob/main/docs/README.md
Description-Content-Type: text/markdown

"""
        + read("release/wheel.md").decode()
    )


def digest(data: bytes) -> str:
    """A SHA-256 as wheels write it."""
    return base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
