"""Agents on two real prefill engines, neither of which has room for all of them.

What the engines have computed, by their own counters, is compared with what had to be computed: each
session's new tokens, and what all sessions have in common once on each engine.
"""

import os
import random

import pytest

from support import pairs, prompts
from support import router as routers
from support.engine import BLOCK_SIZE

SESSIONS, TURNS = 60, 5
HEAD_TOKENS = 8 * BLOCK_SIZE
TURN_TOKENS = 4 * BLOCK_SIZE


@pytest.fixture(scope="module")
def engines():
    with pairs.running("peers", "PEER") as pair:
        yield pair.engines


def computed_tokens(engines):
    return sum(engine.prompt_tokens_by_source()["local_compute"] for engine in engines)


def test_sessions_share_the_caches_of_two_engines(engines, decode, start_router):
    workers = [routers.worker(f"p{i}", "prefill", engine) for i, engine in enumerate(engines)]
    workers.append(routers.worker("d0", "decode", decode))
    choose = random.Random(int(os.environ.get("SPLITRAIL_SEED", 7)))
    head = prompts.token_ids(HEAD_TOKENS)
    sessions = [list(head) for _ in range(SESSIONS)]
    blocks = HEAD_TOKENS // BLOCK_SIZE + SESSIONS * TURNS * TURN_TOKENS // BLOCK_SIZE
    assert engines[0].kv_blocks() < blocks < 2 * engines[0].kv_blocks()
    by_worker, possible = {"p0": 0, "p1": 0}, 2 * HEAD_TOKENS
    with start_router("placement", workers, policy="predicted_ttft") as router:
        before = computed_tokens(engines)
        for _ in range(TURNS):
            choose.shuffle(sessions)
            for session in sessions:
                session += prompts.token_ids(TURN_TOKENS)
                possible += TURN_TOKENS
                answer = router.complete(session, max_tokens=1)
                by_worker[router.decision(answer.request_id)["prefill_worker"]] += 1
        computed = computed_tokens(engines) - before
    print(f"computed {computed} tokens, possible {possible}; requests {by_worker}")
    assert computed <= 1.25 * possible, by_worker
    assert min(by_worker.values()) >= SESSIONS * TURNS / 4, by_worker
