"""Servers of SGLang, asked directly, and routers before them."""

import contextlib
import os
import pathlib
import subprocess

import httpx
import pytest

from . import pairs, plain_http
from . import router as routers
from .engine import Engine
from .waiting import eventually

# One server alone, and halves of pairs. Only addresses are written down: the rest is asked of the engines.
CONFIG = """\
listen: {{ http: 127.0.0.1:0, admin: 127.0.0.1:0 }}
models:
  - name: tiny
    tokenizer: "{model_path}"
    connector: sglang
    on_no_prefill: fail
    policy: {{ kind: kv_overlap }}
    # Once, before it is ready: later it would be among what tests count.
    canary: {{ interval: 24h }}
    # Engines break here on purpose; they are to be asked again at once.
    breaker: {{ failures: 0 }}
    workers:
{workers}
  - name: tiny-aggregated
    tokenizer: "{model_path}"
    engine: sglang
    canary: {{ interval: 24h }}
    workers: ["{alone}"]
"""


class SglangEngine(Engine):
    def cached_tokens(self):
        """Prompt tokens that the engine has found in its cache so far, by its own count."""
        return int(self.metrics().sum("sglang:cached_tokens_total"))

    def requests(self):
        """Requests that run, wait, or hold pages for the other half of their pair."""
        (rank,) = plain_http.get(f"{self.url}/v1/loads", timeout=30).json()["loads"]
        queues = rank.get("disaggregation") or {}
        transfers = sum(count for name, count in queues.items() if name.endswith("_queue_reqs"))
        return rank["num_running_reqs"] + rank["num_waiting_reqs"] + transfers

    def forget(self):
        """Drops the engine's cache."""
        httpx.post(f"{self.url}/flush_cache", timeout=30).raise_for_status()


class Servers(pairs.Pair):
    """All servers of `engines.sh sglang`. They can be killed."""

    def __init__(self, ports):
        self.engines = [SglangEngine(port) for port in ports]
        self.alone, *self.prefills, self.decode, self.caching_decode = self.engines

    def prefill(self, worker):
        """The prefill engine with this id."""
        return self.prefills[int(worker.removeprefix("p"))]

    def are_idle(self):
        """Nothing runs, waits or is held for anybody."""
        for engine in self.engines:
            eventually(engine.requests, lambda count: count == 0, f"requests on {engine.port}")


@contextlib.contextmanager
def running():
    ports = os.environ["SPLITRAIL_SGLANG_PORTS"].split()
    started = subprocess.run(
        [pairs.SCRIPT, "sglang", *ports],
        stderr=subprocess.PIPE,
        text=True,
        timeout=pairs.START_TIMEOUT_S,
    )
    try:
        if started.returncode == pairs.CANNOT_BE_HAD:
            pytest.skip(f"SKIPPED: sglang: {started.stderr.strip()}")
        assert started.returncode == 0, started.stderr
        yield Servers(map(int, ports))
    finally:
        subprocess.run([pairs.SCRIPT, "stop", *ports], check=True, timeout=60)


def config(servers, decode):
    """The configuration of a router before the server alone, and before pairs with this decode engine."""
    workers = [
        f'      - {{ id: p{index}, role: prefill, url: "{engine.url}", bootstrap: "{engine.bootstrap}" }}'
        for index, engine in enumerate(servers.prefills)
    ]
    workers.append(f'      - {{ id: d0, role: decode, url: "{decode.url}" }}')
    return CONFIG.format(
        model_path=os.environ["SPLITRAIL_MODEL_PATH"],
        workers="\n".join(workers),
        alone=servers.alone.url,
    )


def router(servers, decode, name):
    return running_router(config(servers, decode), name)


@contextlib.contextmanager
def running_router(yaml, name):
    folder = pathlib.Path(os.environ["SPLITRAIL_TEST_LOGS"]) / name
    binary = os.environ["SPLITRAIL_BIN"]
    with routers.running(binary, yaml, folder) as router:
        eventually(router.is_ready, bool, "the router is ready")
        all_up(router)
        yield router


def all_up(router):
    """All workers are up, and agree with the router on tokens and blocks."""

    def seen():
        return {(known["id"], known["up"], known["parity"]) for known in router.workers()}

    eventually(seen, lambda seen: all((up, parity) == (True, "ok") for _, up, parity in seen), "workers")
