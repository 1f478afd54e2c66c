"""SGLang: a server with two data-parallel ranks, each of which has a cache of its own."""

import os
import subprocess

import pytest

from support import pairs, prompts, sglang
from support.engine import Engine, full_hit
from support.waiting import eventually, settled

CONFIG = """\
listen: {{ http: 127.0.0.1:0, admin: 127.0.0.1:0 }}
models:
  - name: tiny
    tokenizer: "{model_path}"
    engine: sglang
    canary: {{ interval: 24h }}
    workers: ["{url}"]
"""


@pytest.fixture
def router():
    port = os.environ["SPLITRAIL_SGLANG_RANKS_PORT"]
    command = [pairs.SCRIPT, "sglang_ranks", port]
    if subprocess.run(command, timeout=pairs.START_TIMEOUT_S).returncode == pairs.CANNOT_BE_HAD:
        pytest.skip("SKIPPED: no SGLang on this machine")
    url = Engine(int(port)).url
    yaml = CONFIG.format(model_path=os.environ["SPLITRAIL_MODEL_PATH"], url=url)
    with sglang.running_router(yaml, "sglang-ranks") as router:
        yield router
    subprocess.run([pairs.SCRIPT, "stop", port], check=True, timeout=60)


def test_a_prompt_returns_to_its_rank(router):
    def ranks():
        (worker,) = router.workers()
        return worker["takes_rank_header"], [rank["events_current"] for rank in worker["ranks"]]

    def indexed():
        return [rank["index_blocks"] for rank in router.workers()[0]["ranks"]]

    eventually(ranks, lambda seen: seen == (True, [True, True]), "both ranks")
    batch, used = [prompts.token_ids(100 + 40 * index) for index in range(8)], set()
    for warm in (False, True):
        for prompt in batch:
            settled(indexed)
            answer = router.complete(prompt)
            record = router.decision(answer.request_id)
            cached = full_hit(len(prompt)) if warm else 0
            assert (record["estimated_cached_tokens"], answer.cached_tokens) == (cached, cached)
            (chosen,) = [seen for seen in record["candidates"] if seen["chosen"]]
            used.add((chosen["rank"], len(prompt)))
    # Each prompt went to one rank, and both ranks were used.
    assert len(used) == len(batch) and {rank for rank, _ in used} == {0, 1}
