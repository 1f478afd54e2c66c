"""A prefill engine takes a prefix from another prefill engine, which has too much work to use it itself."""

import contextlib

import pytest

from support import kills, log_probabilities, pairs, prompts, proxy
from support.engine import BLOCK_SIZE
from support.pairs import difference
from support.waiting import eventually, settled

MODEL = (
    "kv_load_failure_policy: fail",
    "peer_fetch_min_tokens: 1",
    "timeouts: { peer_fetch: 60s }",
    # These engines compute faster than they fetch; here they fetch nevertheless.
    "costs: { fetch_base_ms: 0, prefill_us_per_token: 20000 }",
    "queue: none",
    "saturation: { requests: 1 }",
    # What decode keeps pinned is for the next turn.
    "read_back: true",
    "read_back_pin: 240s",
    "read_back_pinned_percent_max: 90",
)


@pytest.fixture(scope="module", params=["two_step", "one_shot"])
def way(request):
    return request.param


@pytest.fixture(scope="module")
def cluster(pair, decode, way):
    """Both engines of the pair are prefill workers. The decode engine is another one, without the flag."""
    three = pairs.Pair(pair.prefill.port, decode.port)
    more = (f"peer_fetch: {way}", *MODEL)
    options = {"name": f"prefill-{way}", "policy": "predicted_ttft", "top": "hash_seed: 5318008\n"}
    with pairs.cluster(three, "nixl", decode, more=more, second=pair.decode, **options) as cluster:
        if way == "one_shot":
            # The first fetch takes two steps, and shows that the engine has the flag.
            prefix = prompts.token_ids(320)
            cluster.hold([prefix], pair.decode, "p1")
            with busy(cluster):
                prompt = prefix + prompts.token_ids(50)
                would_fetch(cluster.router, prompt)
                answer = cluster.router.complete(prompt)
            assert cluster.router.decision(answer.request_id)["fetch"]["way"] == "two_step"
            cluster.nothing_is_held(*pair.engines)
        yield cluster
    eventually(pair.prefill.kv_usage, lambda usage: usage == 0, "nothing is pinned")


@contextlib.contextmanager
def busy(cluster):
    """The other prefill engine has as many requests as it may, for as long as the body runs."""
    prompt = prompts.token_ids(40)
    with cluster.book.fault("prefill", proxy.HOLD, prompt, times=1) as fault:
        with cluster.router.draining("p0"):
            asked = cluster.ask_later(prompt)
            kills.happened(fault, "a request of the other prefill engine")
        try:
            yield
        finally:
            fault.go.set()
    asked.result()


def would_fetch(router, prompt):
    """A dry run, as soon as the other engine is predicted to send in time. Returns its candidates."""

    def candidates():
        (told,) = router.explain("/v1/completions", prompt=prompt)["explanation"]["prompts"]
        return {candidate["worker"]: candidate for candidate in told["steps"][0]["candidates"]}

    return eventually(candidates, lambda told: told["p0"].get("fetch"), "a fetch in a dry run")


@pytest.mark.parametrize("beside", [0, 7], ids=["whole", "partial"])
def test_a_prefix_of_a_busy_prefill_engine_is_taken_from_it(cluster, pair, way, beside):
    router, fetcher, source, held = cluster.router, pair.prefill, pair.decode, 320
    prefix = prompts.token_ids(held + beside)
    prompt = prefix + prompts.token_ids(50)
    cluster.hold([prefix], source, "p1")
    reference = log_probabilities.cold(router.complete, prompt)

    def counts():
        told, counted = cluster.prefill_counts()
        released = router.metrics().sum("splitrail_read_back_releases_total", outcome="released")
        return told, counted, settled(source.prompt_tokens_by_source), {"pins": int(released)}

    with busy(cluster):
        candidates = would_fetch(router, prompt)
        before = counts()
        answer = router.complete(prompt)
        # What a fetch in two steps leaves pinned is freed by the other engine with the flag.
        cluster.nothing_is_held(fetcher)
        told, counted, given, released = map(difference, counts(), before)
    log_probabilities.assert_exact(answer, reference)
    assert answer.cached_tokens == held

    # The dry run has said it: the engine that holds the prefix has enough work, and can send.
    assert candidates["p0"]["fetch"]["source"] == "p1", candidates
    assert candidates["p1"]["veto"] == "busy", candidates
    decision = router.decision(answer.request_id)
    record = decision["fetch"]
    assert (decision["prefill_worker"], record["source"]) == ("p0", "p1"), decision
    assert (record["way"], record["outcome"]) == (way, "fetched"), record
    assert record["blocks"] == held // BLOCK_SIZE

    # The source computes one token, and one for a pin that it frees.
    pins = 1 if way == "two_step" else 0
    assert released == {"pins": pins}
    expected = {"local_cache_hit": held, "external_kv_transfer": 0}
    assert given == {**expected, "local_compute": 1 + pins}
    # What a fetch in two steps takes is beside the ledger's leg.
    hits, taken = (held, 0) if way == "two_step" else (0, held)
    expected = {"local_cache_hit": hits, "external_kv_transfer": taken}
    assert told == {**expected, "local_compute": len(prompt) - held}
    assert counted == {**told, "external_kv_transfer": taken or held + 1}
    cluster.prefill_holds(prompt, reference)
    cluster.nothing_is_held(*pair.engines, patience_s=kills.LEASE_S)
    assert cluster.book.sent_twice() == []
