"""Speculative decoding with EAGLE: vLLM drops the last block of each hit, which the router learns."""

import os
import pathlib
import random
import subprocess

import pytest

from support import pairs
from support import router as routers
from support.engine import BLOCK_SIZE, Engine
from support.waiting import settled
from test_hybrid import workload

REQUESTS = 80
# With so few blocks, the workload evicts some.
BLOCKS = 100
# Contradicting figures in a row after which the router follows the other rule.
CERTAIN = 8


@pytest.fixture(scope="module")
def engine():
    port = os.environ["SPLITRAIL_HYBRID_PORT"]
    subprocess.run([pairs.SCRIPT, "eagle", port, str(BLOCKS)], check=True, timeout=900)
    yield Engine(int(port))
    subprocess.run([pairs.SCRIPT, "stop", port], check=True, timeout=60)


@pytest.fixture(scope="module")
def eagle_router(engine):
    folder = pathlib.Path(os.environ["SPLITRAIL_TEST_LOGS"]) / "eagle"
    workers = [routers.worker("e0", "both", engine)]
    yaml = routers.hybrid_config(os.environ["SPLITRAIL_MODEL_PATH"], workers)
    with routers.running(os.environ["SPLITRAIL_BIN"], yaml, folder) as router:
        yield router


def test_the_router_learns_that_the_engine_drops_the_last_block_of_a_hit(eagle_router):
    router, history, wrong = eagle_router, [], []
    for number, prompt in enumerate(workload(random.Random(5), history, REQUESTS)):
        settled(lambda: router.metrics().sum("splitrail_index_events_total", worker="e0"))
        answer = router.complete(prompt, max_tokens=random.choice([1, 3, 20]))
        record = router.decision(answer.request_id)
        over = record["estimated_cached_tokens"] - answer.cached_tokens
        assert over in (0, BLOCK_SIZE), number
        if over:
            wrong.append(number)
        history.append(prompt)
    (worker,) = router.workers()
    assert (worker["drops_last_block"], worker["parity"]) == (True, "ok")
    assert len(wrong) == CERTAIN, wrong
