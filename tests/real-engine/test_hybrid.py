"""Hybrid models: the engine uses of each prompt what the index promises, with eviction."""

import os
import pathlib
import random
import subprocess

import pytest

from support import router as routers
from support.engine import Engine
from support.waiting import settled

REQUESTS = 200
# The cache groups that each kind of model has besides full attention, and a number of KV blocks with which
# the workload evicts some.
KINDS = {
    "gpt_oss": (["sliding_window"], 60),
    "gemma3": (["sliding_window"], 160),
    "qwen3_next": (["mamba"], 80),
}


@pytest.fixture(scope="module", params=sorted(KINDS))
def kind(request):
    return request.param


@pytest.fixture(scope="module")
def engine(kind):
    script = pathlib.Path(__file__).with_name("engines.sh")
    port = os.environ["SPLITRAIL_HYBRID_PORT"]
    blocks = str(KINDS[kind][1])
    subprocess.run([script, "hybrid", port, kind, blocks], check=True, timeout=900)
    yield Engine(int(port))
    subprocess.run([script, "stop", port], check=True, timeout=60)


@pytest.fixture(scope="module")
def hybrid_router(engine, kind):
    folder = pathlib.Path(os.environ["SPLITRAIL_TEST_LOGS"]) / f"hybrid-{kind}"
    # Which tokenizer class an engine uses depends on the kind of model as well.
    model = pathlib.Path(os.environ["SPLITRAIL_MODEL_PATH"]).with_name(f"tiny-hybrid-{kind}")
    yaml = routers.hybrid_config(model, [routers.worker("h0", "both", engine)])
    with routers.running(os.environ["SPLITRAIL_BIN"], yaml, folder) as router:
        yield router


def workload(choose, history, requests=REQUESTS):
    """A shared prefix with another end, a further turn of a chat, or a prompt again."""

    def ids(count):
        return [choose.randrange(3, 2000) for _ in range(count)]

    trunks = [ids(choose.choice([160, 256, 330])) for _ in range(4)]
    history.append(trunks[0])
    for _ in range(requests):
        draw = choose.random()
        if draw < 0.45:
            trunk = choose.choice(trunks)
            prompt = trunk[: choose.choice([len(trunk), len(trunk) // 2])] + ids(choose.randrange(1, 80))
        elif draw < 0.8:
            prompt = choose.choice(history[-8:]) + ids(choose.randrange(1, 60))
        else:
            prompt = choose.choice(history[-8:])
        yield prompt[:900]


def test_the_engine_uses_what_the_index_promises(hybrid_router, kind):
    router, history, partly_usable = hybrid_router, [], 0
    for prompt in workload(random.Random(5), history):
        settled(lambda: router.metrics().sum("splitrail_index_events_total", worker="h0"))
        answer = router.complete(prompt, max_tokens=random.choice([1, 3, 20]))
        record = router.decision(answer.request_id)
        assert record["estimated_cached_tokens"] == answer.cached_tokens, len(prompt)
        (chosen,) = [seen for seen in record["candidates"] if seen["chosen"]]
        partly_usable += chosen.get("spine_blocks", 0) > chosen["overlap_blocks"]
        history.append(prompt)
    assert partly_usable > 5, "of some prompts, full attention holds more than the engine uses"
    (worker,) = router.workers()
    assert (worker["parity"], worker["kv_routing"]) == ("ok", True)
    assert (worker["cache_groups"], worker["unfollowed_cache_groups"]) == (KINDS[kind][0], [])
