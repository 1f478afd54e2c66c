"""Bills of materials: CycloneDX 1.6, one for each program."""

import hashlib
import json
import uuid
from datetime import UTC, datetime

from .source import checksums, commit, epoch_s, linked, metadata, used, workspace


def make(release, report) -> None:
    """Writes the bill of each program."""
    for name, data in release.sboms.items():
        path = report.save(name, data)
        if report.verifies:
            components = json.loads(data)["components"]
            report.verify(path, f"{len(components)} crates, each in Cargo.lock")


def of(program, release) -> bytes:
    """The bill of a program: what is linked is `required`, what only builds it `excluded`."""
    target = release.arch.target
    inside, whole = linked(program.name, target), used(program.name, target)
    packages = {package["id"]: package for package in metadata(target)["packages"]}
    chosen = {
        id: package
        for id, package in packages.items()
        if (package["name"], package["version"]) in inside | whole
    }
    root = next(id for id, package in chosen.items() if package["name"] == program.name)
    components = [component(package, inside) for id, package in chosen.items() if id != root]
    about = component(chosen[root], inside) | {"type": "application"}
    about["hashes"] = [{"alg": "SHA-256", "content": hashlib.sha256(program.data).hexdigest()}]
    about.pop("scope")
    bill = {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {
            "timestamp": datetime.fromtimestamp(epoch_s(), UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
            "component": about,
            "properties": [{"name": "splitrail:target", "value": target}]
            + [{"name": "splitrail:commit", "value": value} for value in [commit()] if value],
        },
        "components": sorted(components, key=lambda one: one["bom-ref"]),
        "dependencies": dependencies(target, chosen),
    }
    # The same bill has the same number.
    number = uuid.uuid5(uuid.NAMESPACE_URL, json.dumps(bill, sort_keys=True))
    bill["serialNumber"] = f"urn:uuid:{number}"
    return (json.dumps(bill, indent=1, sort_keys=True) + "\n").encode()


def reference(package: dict) -> str:
    """The package URL of a crate, by which a bill refers to it."""
    return f"pkg:cargo/{package['name']}@{package['version']}"


def component(package: dict, inside: frozenset[tuple[str, str]]) -> dict:
    """What a bill says of a crate."""
    key = (package["name"], package["version"])
    about = {
        "type": "library",
        "bom-ref": reference(package),
        "name": package["name"],
        "version": package["version"],
        "purl": reference(package),
        "scope": "required" if key in inside else "excluded",
    }
    licence = package["license"] or (None if package["source"] else workspace()["license"])
    if licence:
        # The slash is an older way of writing "or".
        about["licenses"] = [{"expression": licence.replace("/", " OR ").replace("  ", " ")}]
    if package["description"]:
        about["description"] = " ".join(package["description"].split())
    if package["repository"]:
        about["externalReferences"] = [{"type": "vcs", "url": package["repository"]}]
    if package["source"]:
        # A crate that is not in Cargo.lock is an error.
        about["hashes"] = [{"alg": "SHA-256", "content": checksums()[key]}]
    return about


def dependencies(target: str, chosen: dict[str, dict]) -> list[dict]:
    """Which crate of a bill uses which."""
    lines = []
    for node in metadata(target)["resolve"]["nodes"]:
        if node["id"] not in chosen:
            continue
        uses = []
        for other in node["deps"]:
            is_for_tests = all(kind["kind"] == "dev" for kind in other["dep_kinds"])
            if other["pkg"] in chosen and not is_for_tests:
                uses.append(reference(chosen[other["pkg"]]))
        lines.append({"ref": reference(chosen[node["id"]]), "dependsOn": sorted(set(uses))})
    return sorted(lines, key=lambda line: line["ref"])
