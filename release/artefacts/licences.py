"""The licences of the crates that are linked into the programs."""

import re
from pathlib import Path

from .source import linked, metadata

# Texts of licences; those of C code that a crate brings along are some folders down.
FILE = re.compile(r"^(licen[cs]e|copying|copyright|notice|unlicense)", re.IGNORECASE)
NOT_TEXT = re.compile(r"\.(rs|py|sh|toml|json|ya?ml)$", re.IGNORECASE)
DEPTH_MAX = 4

HEADER = """\
The programs of Splitrail contain the crates that are listed here, under the licences that follow
each list. Splitrail itself is under the Apache License 2.0 (LICENSE).

The standard library of Rust is Copyright (c) The Rust Project contributors, under MIT or Apache-2.0
(https://github.com/rust-lang/rust/blob/master/COPYRIGHT).
"""


def text(target: str, programs: tuple[str, ...]) -> str:
    """All texts, each with the crates that it is the licence of."""
    wanted = frozenset().union(*(linked(program, target) for program in programs))
    packages = [package for package in metadata(target)["packages"] if package["source"]]
    packages = sorted(
        (package for package in packages if (package["name"], package["version"]) in wanted),
        key=lambda package: (package["name"], package["version"]),
    )
    crates_of: dict[str, list[str]] = {}
    without = []
    for package in packages:
        title = f"{package['name']} {package['version']} ({package['license'] or 'see its file'})"
        texts = texts_of(Path(package["manifest_path"]).parent)
        for licence in texts:
            crates_of.setdefault(licence, []).append(title)
        if not texts:
            authors = ", ".join(package["authors"]) or f"the authors of {package['name']}"
            without.append(f"{title}: Copyright (c) {authors}")
    sections = [HEADER]
    if without:
        sections.append("Crates that bring no text of their licence:\n\n" + "\n".join(without) + "\n")
    for licence, titles in sorted(crates_of.items(), key=lambda item: (-len(item[1]), item[1], item[0])):
        sections.append("\n".join(titles) + "\n\n" + licence + "\n")
    return ("\n" + "=" * 80 + "\n\n").join(sections)


def texts_of(folder: Path) -> list[str]:
    """The different licence texts in a crate's folder."""
    found = []
    for path in sorted(folder.rglob("*")):
        inside = path.relative_to(folder).parts
        skipped = len(inside) > DEPTH_MAX or any(part in ("tests", "benches", "target") for part in inside)
        if skipped or not FILE.match(path.name) or NOT_TEXT.search(path.name) or not path.is_file():
            continue
        content = path.read_text(encoding="utf-8", errors="replace").replace("\r\n", "\n").strip()
        if content and content not in found:
            found.append(content)
    return found
