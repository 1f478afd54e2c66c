"""A prefill engine takes prefixes from the decode engine that holds them, instead of computing them.

Its tests come late by name, since the engines take longer to start than they take.
"""

import contextlib
import itertools

import pytest

from support import kills, log_probabilities, outcome, pairs, prompts, proxy
from support.engine import BLOCK_SIZE, full_hit
from support.pairs import difference
from support.waiting import eventually

# Whole blocks, and what is beside a boundary.
PREFIX_TOKENS = (32, 64, 320, 640, 992, 1280)

MODEL = (
    "peer_fetch: two_step",
    "peer_fetch_min_tokens: 1",
    "peer_fetch_max_per_worker: 32",
    # These engines compute faster than they fetch; here they fetch nevertheless.
    "costs: { fetch_base_ms: 0, prefill_us_per_token: 1000000 }",
    "queue: none",
)


@pytest.fixture(scope="module")
def pair():
    with pairs.running("peers", "PEER") as pair:
        yield pair


@pytest.fixture(scope="module")
def cluster(pair, decode):
    more = (*MODEL, "timeouts: { peer_fetch: 60s }")
    options = {"name": "fetch", "policy": "predicted_ttft", "more": more}
    with pairs.cluster(pair, "nixl", decode, **options) as cluster:
        yield cluster


def fetches(router):
    name = "splitrail_peer_fetches_total"
    metrics = router.metrics()
    return metrics.sum(name, outcome="fetched"), metrics.sum(name)


@pytest.mark.parametrize("prefix_tokens", PREFIX_TOKENS[::2])
@pytest.mark.parametrize("beside", [0, 7], ids=["whole", "partial"])
def test_a_fetched_prefix_is_the_prefix_itself(cluster, prefix_tokens, beside):
    router = cluster.router
    prefix = prompts.token_ids(prefix_tokens + beside)
    prompt = prefix + prompts.token_ids(50)
    cluster.hold([prefix])
    (told, counted), (fetched, ended) = cluster.prefill_counts(), fetches(router)
    reference = log_probabilities.cold(router.complete, prompt)
    answer = router.complete(prompt)
    log_probabilities.assert_exact(answer, reference)
    record = router.decision(answer.request_id)["fetch"]
    assert (record["outcome"], record["source"]) == ("fetched", "d0"), record
    assert record["blocks"] == prefix_tokens // BLOCK_SIZE
    assert answer.cached_tokens == prefix_tokens
    assert fetches(router) == (fetched + 1, ended + 1)

    # The ledger's prefill leg is the engine's: the fetch itself is beside it.
    told, counted = map(difference, cluster.prefill_counts(), (told, counted))
    assert told == {**counted, "external_kv_transfer": 0}
    assert told["local_cache_hit"] == prefix_tokens
    assert counted["external_kv_transfer"] == prefix_tokens + 1

    cluster.prefill_holds(prompt, reference)
    cluster.nothing_is_held()


def test_prompts_of_every_length_fetch_their_prefixes_at_once(cluster):
    """Of each prompt, all whole blocks but for the last token are fetched, and the rest computed."""
    router = cluster.router
    batch = [prompts.token_ids(length) for length in prompts.LENGTHS]
    references = cluster.references(batch)
    hits = list(map(full_hit, prompts.LENGTHS))
    cluster.hold(batch)
    (told, counted), (fetched, _) = cluster.prefill_counts(), fetches(router)
    asked = cluster.ask_all(batch, references)
    assert asked.cached_tokens == hits
    assert fetches(router)[0] == fetched + len(batch)
    told, counted = map(difference, cluster.prefill_counts(), (told, counted))
    assert told == {**counted, "external_kv_transfer": 0}
    assert told["local_cache_hit"] == sum(hits)
    # Each fetch takes the prefix and one more token.
    assert counted["external_kv_transfer"] == sum(hits) + len(batch)
    assert cluster.book.sent_twice() == []
    cluster.nothing_is_held()


def test_requests_for_one_prefix_at_the_same_time_share_a_fetch(cluster):
    prefixes = [prompts.token_ids(tokens) for tokens in PREFIX_TOKENS]
    batch = [prefix + prompts.token_ids(20 + turn) for turn in range(2) for prefix in prefixes]
    references = cluster.references(batch)
    cluster.hold(prefixes)
    before = fetches(cluster.router)
    cluster.ask_all(batch, references)
    fetched, ended = (after - then for after, then in zip(fetches(cluster.router), before))
    assert fetched == len(prefixes) and fetched <= ended <= len(batch)
    cluster.nothing_is_held()


def test_what_was_generated_is_fetched_by_the_next_turn(cluster):
    router = cluster.router
    body = outcome.body(prompts.token_ids(200), stream=False, max_tokens=90)
    # The last token that was generated has no KV.
    with router.indexing("d0", 289 // BLOCK_SIZE):
        first = router.post("/v1/completions", json={**body, "return_token_ids": True}).json()
    prompt = body["prompt"] + first["choices"][0]["token_ids"] + prompts.token_ids(40)
    (asked,) = cluster.ask_all([prompt]).answers
    assert asked.cached_tokens == 289 // BLOCK_SIZE * BLOCK_SIZE


def test_engines_fetch_by_default_after_a_trial(pair, decode):
    more = tuple(line for line in MODEL if line != "peer_fetch: two_step")
    options = {"name": "fetch-auto", "policy": "predicted_ttft", "more": more}
    with pairs.cluster(pair, "nixl", decode, **options) as cluster:

        def fetched():
            prefix = prompts.token_ids(320)
            cluster.hold([prefix])
            answer = cluster.router.complete(prefix + prompts.token_ids(50))
            fetch = cluster.router.decision(answer.request_id).get("fetch") or {}
            return fetch.get("outcome"), answer.cached_tokens

        eventually(fetched, lambda seen: seen == ("fetched", 320), "a fetch")
        cluster.nothing_is_held()


# The source of a prefix, or the engine that fetches it, is killed at a step.
STEPS = (
    "in the first step",
    "between the steps",
    "in the second step",
    "after the second step",
    "before decode pulls",
    "while decode pulls",
)
KILLS = tuple(itertools.product(("source", "fetcher"), STEPS))
TELLING = (("source", "between the steps"),)


@pytest.fixture
def spared(pair, decode):
    """A second decode engine answers for the source if that is gone. The router is new, as engines that
    have failed take part in no fetch for a while.
    """
    more = (*MODEL, "timeouts: { peer_fetch: 10s }")
    options = {"name": "fetch-kills", "policy": "predicted_ttft", "more": more, "spare": decode}
    with pairs.cluster(pair, "nixl", decode, **options) as cluster:
        yield cluster


@pytest.mark.parametrize(("victim", "step"), kills.chosen(KILLS, TELLING))
def test_an_engine_is_killed_during_a_fetch(spared, pair, decode, victim, step):
    router, prefix = spared.router, prompts.token_ids(320)
    prompt = prefix + prompts.token_ids(50)
    spared.hold([prefix])
    spared.nothing_is_held()
    asked = prompt[: len(prefix) + 1]
    role, body = {
        "in the first step": ("decode", asked),
        "between the steps": ("prefill", asked),
        "in the second step": ("prefill", asked),
        "after the second step": ("prefill", prompt),
        "before decode pulls": ("decode", prompt),
        "while decode pulls": ("decode", prompt),
    }[step]
    sends, takes = {
        "in the second step": (pair.decode, pair.prefill),
        "while decode pulls": (pair.prefill, pair.decode),
    }.get(step, (None, None))
    killed, survivor = (pair.decode, pair.prefill)[:: 1 if victim == "source" else -1]
    with contextlib.ExitStack() as alone, spared.book.fault(role, proxy.HOLD, body, 1) as fault:
        # The source is to decode, too.
        alone.enter_context(router.draining("d1"))
        with kills.Kill(spared, killed, prompt) as kill:
            kills.strike_at(kill, fault, step, sends, takes, reached=alone.close)
    assert kill.outcome.done, "another engine answers"
    spared.nothing_is_held(survivor, decode, patience_s=kills.LEASE_S)
    # What the survivor has in its cache is right.
    log_probabilities.assert_exact(router.complete(prompt), kill.expected)
    kills.recover(spared, killed)
    log_probabilities.assert_exact(router.complete(prompt), kill.expected)
