"""`splitrail-shim` before a real engine."""

import contextlib
import os
import pathlib
import socket

from . import process
from .engine import BLOCK_SIZE

CONFIG = """\
listen:
  http: 127.0.0.1:0
  admin: 127.0.0.1:0
  fleet: 127.0.0.1:{fleet_port}
models:
  - name: tiny
    block_size: {block_size}
    tokenizer: {{ kind: huggingface, path: "{model_path}" }}
    flow: decode_first
    connector: nixl
    # Every prompt is asked about, whatever the index knows.
    gate: {{ kind: shim, index_first: false }}
    policy: {{ kind: kv_overlap }}
    canary: {{ interval: 24h }}
    discovery: [ {{ kind: shim }} ]
  - name: tiny-aggregated
    block_size: {block_size}
    tokenizer: {{ kind: huggingface, path: "{model_path}" }}
    flow: aggregated
    connector: none
    policy: {{ kind: round_robin }}
    canary: {{ enabled: false }}
    workers:
      - {{ id: a0, role: both, url: "{aggregated_url}" }}
"""


def free_port():
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        return held.getsockname()[1]


def router_config(fleet_port, aggregated):
    return CONFIG.format(
        fleet_port=fleet_port,
        block_size=BLOCK_SIZE,
        model_path=os.environ["SPLITRAIL_MODEL_PATH"],
        aggregated_url=aggregated.url,
    )


@contextlib.contextmanager
def attached(id, role, engine, routers, folder):
    """Runs a shim for as long as the body runs; ends it, drained, afterwards."""
    binary = pathlib.Path(os.environ["SPLITRAIL_BIN"]).with_name("splitrail-shim")
    command = [
        binary, "--engine", engine.url, "--listen", "127.0.0.1:0", "--role", role, "--id", id,
        "--router", ",".join(f"127.0.0.1:{port}" for port in routers),
    ]  # fmt: skip
    with process.running(command, folder, id) as ready:
        yield ready
