"""A pair of hybrid models over NIXL: prefill uses what the index promises, decode holds what the router
believes, and replies are those of one engine alone.
"""

import os
import pathlib
import random
import subprocess

import pytest

from support import log_probabilities, pairs
from support import router as routers
from support.engine import SOURCES, Engine
from support.waiting import eventually, settled
from test_hybrid import workload

REQUESTS = 80
# A number of KV blocks with which the workload evicts some.
KINDS = {"gpt_oss": 70, "qwen3_next": 60}
LEGS = ("prefill", "decode")


@pytest.fixture(scope="module", params=sorted(KINDS))
def kind(request):
    return request.param


@pytest.fixture(scope="module")
def engines(kind):
    """The engines of the pair, and one of the same model on its own."""
    ports = [*os.environ["SPLITRAIL_HYBRID_PAIR_PORTS"].split(), os.environ["SPLITRAIL_HYBRID_PORT"]]
    command = [pairs.SCRIPT, "hybrid_pd", *ports, kind, str(KINDS[kind])]
    subprocess.run(command, check=True, timeout=900)
    yield [Engine(int(port)) for port in ports]
    subprocess.run([pairs.SCRIPT, "stop", *ports], check=True, timeout=60)


@pytest.fixture(scope="module")
def pair_router(engines, kind):
    folder = pathlib.Path(os.environ["SPLITRAIL_TEST_LOGS"]) / f"hybrid-pair-{kind}"
    model = pathlib.Path(os.environ["SPLITRAIL_MODEL_PATH"]).with_name(f"tiny-hybrid-{kind}")
    workers = [routers.worker(f"{leg[0]}0", leg, engine) for leg, engine in zip(LEGS, engines)]
    yaml = routers.hybrid_config(model, workers, flow="prefill_first", connector="nixl")
    with routers.running(os.environ["SPLITRAIL_BIN"], yaml, folder) as router:
        yield router


def ask_alone(engine, prompt, max_tokens):
    body = {"model": "tiny", "prompt": prompt, "max_tokens": max_tokens, "temperature": 0}
    body |= {"ignore_eos": True, **log_probabilities.COMPLETION}
    reply = engine.post("/v1/completions", body)
    reply.raise_for_status()
    return {0: log_probabilities.steps(reply.json()["choices"][0]["logprobs"])}


def test_a_pair_uses_what_the_router_promises_and_replies_as_one_engine(pair_router, engines, kind):
    router, (_, decode, alone) = pair_router, engines
    choose, history, handed_over, held = random.Random(7), [], 0, 0
    for prompt in workload(choose, history, REQUESTS):
        settled(lambda: router.metrics().sum("splitrail_index_events_total"))
        before = settled(decode.prompt_tokens_by_source)
        max_tokens = choose.choice([2, 3, 20])
        answer = router.complete(prompt, max_tokens=max_tokens)
        record = router.decision(answer.request_id)
        assert record["estimated_cached_tokens"] == answer.cached_tokens, len(prompt)
        log_probabilities.assert_exact(answer, ask_alone(alone, prompt, max_tokens))
        if record["flow"] == "prefill_first":
            grown = pairs.difference(settled_after(decode, before, len(prompt)), before)
            (leg,) = [leg for leg in record["ledger"]["legs"] if leg["leg"] == "decode"]
            assert grown["local_cache_hit"] == leg["local_cache_hit"], (len(prompt), record)
            handed_over, held = handed_over + 1, held + (leg["local_cache_hit"] > 0)
        history.append(prompt)
    assert handed_over >= 60 and held > 20, "most requests are handed over, and decode has a part of many"
    assert {(worker["parity"], worker["kv_routing"]) for worker in router.workers()} == {("ok", True)}


def settled_after(engine, before, tokens):
    """The engine's counts once a prompt of so many tokens is among them."""
    return eventually(
        engine.prompt_tokens_by_source,
        lambda now: sum(now[source] - before[source] for source in SOURCES) >= tokens,
        "the token counts of decode",
    )
