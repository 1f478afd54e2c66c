"""A prefill engine takes prefixes from the decode engine that holds them, instead of computing them.

Its tests come late by name, since the engines take longer to start than they take.
"""

import concurrent.futures
import os
import pathlib
import secrets
import subprocess

import httpx
import pytest

from support import prompts, witness
from support import router as routers
from support.engine import BLOCK_SIZE, Engine, full_hit
from support.waiting import eventually, settled

MAX_TOKENS = 8
# Whole blocks, and what is beside a boundary.
PREFIX_TOKENS = (32, 64, 320, 640, 992, 1280)

CONFIG = """\
listen: {{ http: 127.0.0.1:0, admin: 127.0.0.1:0 }}
models:
  - name: tiny
    block_size: {block_size}
    tokenizer: {{ kind: huggingface, path: "{model_path}" }}
    flow: prefill_first
    connector: nixl
    policy: {{ kind: predicted_ttft }}
    peer_fetch: two_step
    peer_fetch_min_tokens: 1
    peer_fetch_max_per_worker: 16
    # These engines compute faster than they fetch; here they fetch nevertheless.
    costs: {{ fetch_base_ms: 0, prefill_us_per_token: 1000000 }}
    queue: none
    timeouts: {{ peer_fetch: 60s }}
    canary: {{ interval: 24h }}
    workers:
{workers}
"""


@pytest.fixture(scope="module")
def engines():
    script = pathlib.Path(__file__).with_name("engines.sh")
    ports = os.environ["SPLITRAIL_PEER_PORTS"].split()
    try:
        subprocess.run([script, "peers", *ports], check=True, timeout=900)
        yield [Engine(int(port)) for port in ports]
    finally:
        subprocess.run([script, "stop", *ports], check=True, timeout=60)


@pytest.fixture(scope="module")
def router(engines):
    prefill, decode = engines
    workers = [
        routers.worker("p0", "prefill", prefill),
        routers.worker("d0", "decode", decode),
    ]
    yaml = CONFIG.format(
        block_size=BLOCK_SIZE,
        model_path=os.environ["SPLITRAIL_MODEL_PATH"],
        workers="\n".join(workers),
    )
    folder = pathlib.Path(os.environ["SPLITRAIL_TEST_LOGS"]) / "fetch"
    with routers.running(os.environ["SPLITRAIL_BIN"], yaml, folder) as router:
        eventually(
            lambda: [(known["up"], known["parity"]) for known in router.workers()],
            lambda seen: seen == [(True, "ok")] * 2,
            "both workers",
        )
        yield router


def body(prompt, **more):
    greedy = {"max_tokens": MAX_TOKENS, "temperature": 0, "ignore_eos": True}
    return {"model": "tiny", "prompt": prompt, **witness.COMPLETION, **greedy, **more}


def asked(url, body, request_id=None):
    headers = {"x-request-id": request_id or secrets.token_hex(8)}
    reply = httpx.post(f"{url}/v1/completions", json=body, headers=headers, timeout=120)
    assert reply.status_code == 200, reply.text
    return reply.json()


def cold(engine, prompt):
    """What an engine answers that computes all of the prompt."""
    reply = asked(engine.url, body(prompt, cache_salt=secrets.token_hex(8)))
    assert reply["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    return reply


def apart(one, other):
    """By how much the log-probabilities of two replies differ at most."""
    return witness.difference(
        *(witness.steps(reply["choices"][0]["logprobs"]) for reply in (one, other))
    )


def hold(router, engine, prefixes):
    """Lets the decode engine compute prefixes, of which the router learns from its events."""
    blocks = sum(len(prefix) // BLOCK_SIZE for prefix in prefixes)
    with router.indexing("d0", blocks):
        for prefix in prefixes:
            asked(engine.url, body(prefix, max_tokens=1, logprobs=None))


def sources(router, engine):
    return router.prompt_tokens_by_source("prefill"), settled(engine.prompt_tokens_by_source)


def fetches(router):
    name = "splitrail_peer_fetches_total"
    metrics = router.metrics()
    return metrics.sum(name, outcome="fetched"), metrics.sum(name)


def grown(before, after):
    return {source: after[source] - before[source] for source in after}


@pytest.mark.parametrize("prefix_tokens", PREFIX_TOKENS)
@pytest.mark.parametrize("beside", [0, 7], ids=["whole", "partial"])
def test_a_fetched_prefix_is_the_prefix_itself(router, engines, prefix_tokens, beside):
    prefill, decode = engines
    prefix = prompts.token_ids(prefix_tokens + beside)
    prompt = prefix + prompts.token_ids(50)
    hold(router, decode, [prefix])
    (told, counted), (fetched, ended) = sources(router, prefill), fetches(router)
    reference = cold(decode, prompt)
    request_id = secrets.token_hex(8)
    reply = asked(router.http, body(prompt), request_id)
    assert apart(reply, reference) <= witness.TOLERANCE
    record = router.decision(request_id)["fetch"]
    assert (record["outcome"], record["source"]) == ("fetched", "d0"), record
    assert record["blocks"] == prefix_tokens // BLOCK_SIZE
    assert reply["usage"]["prompt_tokens_details"]["cached_tokens"] == prefix_tokens
    assert fetches(router) == (fetched + 1, ended + 1)

    # The ledger's prefill leg is the engine's: the fetch itself is beside it.
    told = grown(told, router.prompt_tokens_by_source("prefill"))
    counted = grown(counted, settled(prefill.prompt_tokens_by_source))
    assert told == {**counted, "external_kv_transfer": 0}
    assert told["local_cache_hit"] == prefix_tokens
    assert counted["external_kv_transfer"] == prefix_tokens + 1

    # What is in the prefill engine's cache now is right for everyone.
    hit = asked(prefill.url, body(prompt))
    assert hit["usage"]["prompt_tokens_details"]["cached_tokens"] == full_hit(len(prompt))
    assert apart(hit, reference) <= witness.TOLERANCE
    for engine in engines:
        eventually(engine.kv_usage, lambda usage: usage == 0, f"blocks held on {engine.port}")


def test_fetches_at_the_same_time_are_all_right(router, engines):
    prefill, decode = engines
    prefixes = [prompts.token_ids(tokens) for tokens in PREFIX_TOKENS]
    asks = [prefix + prompts.token_ids(20 + turn) for turn in range(2) for prefix in prefixes]
    hold(router, decode, prefixes)
    references = [cold(decode, prompt) for prompt in asks]
    before = fetches(router)
    with concurrent.futures.ThreadPoolExecutor(len(asks)) as pool:
        replies = list(pool.map(lambda prompt: asked(router.http, body(prompt)), asks))
    assert max(map(apart, replies, references)) <= witness.TOLERANCE
    fetched, ended = (after - then for after, then in zip(fetches(router), before))
    assert fetched == len(prefixes) and fetched <= ended <= len(asks)
    for engine in engines:
        eventually(engine.kv_usage, lambda usage: usage == 0, f"blocks held on {engine.port}")


def test_what_was_generated_is_fetched_by_the_next_turn(router, engines):
    _, decode = engines
    prompt = prompts.token_ids(200)
    first = asked(router.http, body(prompt, max_tokens=90, return_token_ids=True))
    said = first["choices"][0].get("token_ids")
    if said is None:
        pytest.skip("the router passes no token ids on")
    known = settled(lambda: router.index_blocks("d0"))
    assert known
    prompt = prompt + said + prompts.token_ids(40)
    reply = asked(router.http, body(prompt))
    # The last token that was generated has no KV.
    assert reply["usage"]["prompt_tokens_details"]["cached_tokens"] == 289 // BLOCK_SIZE * BLOCK_SIZE
    assert apart(reply, cold(decode, prompt)) <= witness.TOLERANCE
