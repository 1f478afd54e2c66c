"""OCI layouts: images and indexes, by the digests of their parts."""

import hashlib
import json

from .archive import Tree

TYPE = "application/vnd.oci.image"
# Where an image has the programs, and the user that runs them.
FOLDER = "usr/local/bin"
USER = 65532


class Layout(Tree):
    """The files of a layout: each part is named by its digest."""

    def part(self, kind: str, data: bytes) -> dict:
        """Adds a part, and returns what refers to it."""
        digest = hashlib.sha256(data).hexdigest()
        self.file(f"blobs/sha256/{digest}", data)
        return {"mediaType": f"{TYPE}.{kind}", "digest": f"sha256:{digest}", "size": len(data)}

    def publish(self, pointer: dict, version: str) -> None:
        """Makes a part the one that tools load, with the name that they give it."""
        annotations = {
            "io.containerd.image.name": f"docker.io/library/splitrail:{version}",
            "org.opencontainers.image.ref.name": version,
        }
        self.file("index.json", index([pointer | {"annotations": annotations}]))
        self.file("oci-layout", to_json({"imageLayoutVersion": "1.0.0"}))


def index(pointers: list[dict], **more: object) -> bytes:
    """An index of images or of other indexes."""
    return to_json({"schemaVersion": 2, "mediaType": f"{TYPE}.index.v1+json", "manifests": pointers} | more)


def path(pointer: dict) -> str:
    """The file of a part in a layout."""
    return "blobs/" + pointer["digest"].replace(":", "/")


def to_json(value: object) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()
