"""A prefill engine that restarts takes over hot prefixes from the decode engine, clients first."""

import contextlib

import pytest

from support import kills, log_probabilities, pairs, prompts, proxy
from support.pairs import difference
from support.waiting import eventually, settled

SEED = "hash_seed: 5318008\n"
MODEL = (
    "peer_fetch: one_shot",
    "kv_load_failure_policy: fail",
    "peer_fetch_min_tokens: 64",
    "timeouts: { peer_fetch: 60s }",
    # One at a time, so that the most valuable prefix is taken over first.
    "prewarm: { enabled: true, fetches_max: 1, link_share: 1 }",
    # These engines compute faster than they fetch; here they fetch nevertheless.
    "costs: { fetch_base_ms: 0, prefill_us_per_token: 20000 }",
    "queue: none",
    # What decode keeps pinned is for the next turn.
    "read_back: true",
    "read_back_pin: 240s",
    "read_back_pinned_percent_max: 90",
)
HOT_TOKENS = (1280, 640, 320)
# The lengths of what clients fetch meanwhile.
CLIENTS_TOKENS = 352


@pytest.fixture(scope="module")
def cluster(pair, decode):
    options = {"name": "prewarm", "policy": "predicted_ttft", "top": SEED, "spare": decode}
    with pairs.cluster(pair, "nixl", decode, more=MODEL, **options) as cluster:
        yield cluster


def heat(cluster, prefixes):
    """Sends prompts with common prefixes until the router remembers their tokens."""
    router = cluster.router

    def remembered_bytes():
        with router.draining("d1"):
            for prefix in prefixes:
                # A block of its own, so that a later prompt supersedes no pin: that would release it.
                router.complete(prefix + prompts.token_ids(40))
        return router.metrics().sum("splitrail_hot_prefix_memory_bytes", model="tiny")

    remembered_bytes()
    eventually(remembered_bytes, lambda size: size > 4 * sum(map(len, prefixes)), "hot prefixes")


def prewarm_of(router, worker):
    """How far a worker is prewarmed, as operators see it."""
    (its,) = (known["prewarm"] for known in router.workers() if known["id"] == worker)
    return its


def fetches(router):
    """Fetches that have brought their prefix: of prewarming, and for requests of clients."""
    metrics = router.metrics()
    names = ("splitrail_prewarm_fetches_total", "splitrail_peer_fetches_total")
    return tuple(int(metrics.sum(name, outcome="fetched")) for name in names)


@pytest.mark.skipif(not kills.EVERY, reason="SPLITRAIL_EVERY_KILL is not 1")
def test_a_prefill_engine_that_restarts_takes_over_hot_prefixes(cluster, pair, decode):
    router, book = cluster.router, cluster.book
    prefixes = [prompts.token_ids(tokens) for tokens in HOT_TOKENS]
    heat(cluster, prefixes)

    # A client's leg is under way when the engine is killed.
    prompt = prompts.token_ids(320)
    with book.fault("prefill", proxy.HOLD, prompt, times=1) as fault:
        with kills.Kill(cluster, pair.prefill, prompt) as kill:
            kills.happened(fault, "the prefill leg")
            kill.strike()
            fault.go.set()
    assert kill.outcome.done, "another engine answers"

    # Of each prefix, the source is asked for one more token. The first two fetches wait for the test.
    with contextlib.ExitStack() as faults:
        first, second = (
            faults.enter_context(book.fault("decode", proxy.HOLD, [*prefix, prefix[0]], times=1))
            for prefix in prefixes[:2]
        )
        pair.again(pair.prefill)
        kills.happened(first, "prewarming begins")
        cluster.all_up()
        with router.draining("d1"):
            clients_come_first(cluster, first, second)
        second.go.set()
        tokens, count = sum(HOT_TOKENS), len(HOT_TOKENS)
        told = {"running": False, "prefixes": count, "tokens": tokens}
        eventually(lambda: prewarm_of(router, "p0"), lambda seen: seen == told, "prewarming ends")
    # By its own account, the engine took everything from the other one: for each prefix one token more,
    # as for the first one of the clients', which took two steps; their request found that one.
    counted = settled(pair.prefill.prompt_tokens_by_source)
    assert counted["external_kv_transfer"] == tokens + count + 2 * CLIENTS_TOKENS + 1
    assert counted["local_cache_hit"] == CLIENTS_TOKENS
    metrics = router.metrics()
    assert metrics.sum("splitrail_prewarms_total", model="tiny", end="done") == 1
    assert metrics.sum("splitrail_prewarmed_tokens_total", model="tiny") == tokens
    assert metrics.sum("splitrail_prewarm_fetches_total") == count

    cluster.nothing_is_held(patience_s=kills.LEASE_S)
    assert book.sent_twice() == []
    batch = [prefix + prompts.token_ids(50) for prefix in prefixes]
    references = cluster.references(batch)
    before = cluster.prefill_counts()
    answers = [router.complete(prompt) for prompt in batch]
    for answer, reference in zip(answers, references):
        log_probabilities.assert_exact(answer, reference)
        assert "fetch" not in router.decision(answer.request_id)
    assert tuple(answer.cached_tokens for answer in answers) == HOT_TOKENS
    told, counted = map(difference, cluster.prefill_counts(), before)
    assert told == counted
    expected = {"external_kv_transfer": 0, "local_cache_hit": tokens}
    assert counted == {**expected, "local_compute": 50 * count}


def clients_come_first(cluster, first, second):
    """While a fetch of prewarming lasts, clients fetch. While a client fetches, no other one begins."""
    router = cluster.router
    prefixes = [prompts.token_ids(CLIENTS_TOKENS) for _ in range(2)]
    batch = [prefix + prompts.token_ids(50) for prefix in prefixes]
    references = cluster.references(batch)
    cluster.hold(prefixes)
    log_probabilities.assert_exact(router.complete(batch[0]), references[0])
    assert fetches(router) == (0, 1)

    asking = batch[1][: CLIENTS_TOKENS + 1]
    with cluster.book.fault("decode", proxy.HOLD, asking, times=1) as fault:
        asked = cluster.ask_later(batch[1])
        kills.happened(fault, "the source is asked for a client")
        first.go.set()
        eventually(lambda: fetches(router), lambda seen: seen == (1, 1), "the prefix has come")
        # Meanwhile the router looks for the next prefix again and again.
        router.complete(prompts.token_ids(320), max_tokens=64)
        assert second.fired == 0
        fault.go.set()
        log_probabilities.assert_exact(asked.result(), references[1])
    kills.happened(second, "prewarming goes on")
