"""A hung engine: its core is stopped, and its API server goes on answering probes."""

import concurrent.futures
import contextlib
import os
import pathlib
import signal
import subprocess
import time

import pytest

from support import prompts
from support import router as routers
from support.waiting import eventually

CONFIG = """\
listen: {{ http: 127.0.0.1:0, admin: 127.0.0.1:0 }}
models:
  - name: tiny
    tokenizer: {model_path}
    workers: ["{first}", "{second}"]
"""
REQUESTS = 40


def computing(engine):
    """The processes that compute for a server: those of its group with several threads but itself."""
    folder = pathlib.Path(os.environ["SPLITRAIL_MODEL_PATH"]).parent / "servers"
    server = int((folder / f"{engine.port}.pid").read_text().split()[0])
    listed = subprocess.run(
        ["ps", "-o", "pid=,nlwp=", "-g", str(server)], capture_output=True, text=True, check=True
    )
    found = [map(int, line.split()) for line in listed.stdout.splitlines()]
    pids = [pid for pid, threads in found if threads > 1 and pid != server]
    assert pids, listed.stdout
    return pids


@contextlib.contextmanager
def hung(engine):
    pids = computing(engine)
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)


@pytest.fixture(scope="module")
def router(prefill, decode):
    model_path = os.environ["SPLITRAIL_MODEL_PATH"]
    yaml = CONFIG.format(model_path=model_path, first=prefill.url, second=decode.url)
    folder = pathlib.Path(os.environ["SPLITRAIL_TEST_LOGS"]) / "health"
    with routers.running(os.environ["SPLITRAIL_BIN"], yaml, folder) as router:
        eventually(router.is_ready, bool, "the router is ready")
        yield router


def state_of(router, engine):
    (worker,) = [one for one in router.workers() if one["url"] == engine.url]
    return worker["state"]


def test_requests_on_a_hung_engine_go_elsewhere_and_it_comes_back(router, decode):
    def ask(stream):
        began = time.monotonic()
        router.complete(prompts.token_ids(64), max_tokens=4, stream=stream)
        return time.monotonic() - began

    with concurrent.futures.ThreadPoolExecutor(REQUESTS) as pool:
        # The router knows what each engine usually takes.
        list(pool.map(ask, [True, False] * 8))
        with hung(decode):
            began = time.monotonic()
            assert decode.is_healthy(), "its server still answers"
            asked = []
            for number in range(REQUESTS):
                asked.append(pool.submit(ask, number % 2 == 0))
                time.sleep(0.1)
            waits = sorted(one.result() for one in asked)
            stuck = eventually(
                lambda: state_of(router, decode), lambda state: state == "stuck", "it is stuck"
            )
            print(f"{stuck} before {time.monotonic() - began:.1f} s; the waits end with {waits[-3:]}")
        eventually(
            lambda: state_of(router, decode), lambda state: state == "serving", "it serves again"
        )
