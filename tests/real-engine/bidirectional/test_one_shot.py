"""A prefill leg itself takes a prefix from the decode engine that holds it, and computes the rest."""

import contextlib
import itertools

import pytest

from support import kills, log_probabilities, pairs, prompts, proxy
from support.engine import full_hit
from support.pairs import difference
from support.waiting import eventually

SEED = "hash_seed: 5318008\n"
MODEL = (
    "peer_fetch: one_shot",
    "kv_load_failure_policy: fail",
    "peer_fetch_min_tokens: 1",
    "peer_fetch_max_per_worker: 32",
    "timeouts: { peer_fetch: 60s }",
    # These engines compute faster than they fetch; here they fetch nevertheless.
    "costs: { fetch_base_ms: 0, prefill_us_per_token: 20000 }",
    "queue: none",
    # What decode keeps pinned is for the next turn: releasing it would cost the prefill engine a token
    # that is counted here.
    "read_back: true",
    "read_back_pin: 240s",
    "read_back_pinned_percent_max: 90",
)
# Engines compute what is shorter.
TAKEN_MIN = 64
# Prompts that are asked together. With the costs above, those behind many others are predicted to wait
# for a good part of the lease, and fetch in two steps.
AT_A_TIME = 3


def fetch_of(router, answer):
    """The way and the outcome of the fetch of an answer's request, if there was one."""
    record = router.decision(answer.request_id).get("fetch") or {}
    return record.get("way"), record.get("outcome")


def fetch(cluster):
    """Lets a prompt take a prefix. Returns the way and the outcome."""
    prefix = prompts.token_ids(320)
    with cluster.router.draining("d1"):
        cluster.hold([prefix])
        return fetch_of(cluster.router, cluster.router.complete(prefix + prompts.token_ids(20)))


@pytest.fixture(scope="module")
def cluster(pair, decode):
    """A router whose prefill legs take prefixes from the decode engine, with a second decode engine."""
    options = {"name": "one-shot", "policy": "predicted_ttft", "top": SEED, "spare": decode}
    with pairs.cluster(pair, "nixl", decode, more=MODEL, **options) as cluster:
        with cluster.router.draining("d1"):
            # Its reply shows that the decode engine has the flag.
            cluster.router.complete(prompts.token_ids(50))
        # The first fetch takes two steps, and shows that the prefill engine has it as well.
        assert fetch(cluster) == ("two_step", "fetched")
        # The decode engine frees what the fetch has left pinned.
        cluster.nothing_is_held(pair.prefill)
        yield cluster
    eventually(pair.decode.kv_usage, lambda usage: usage == 0, "a router that stops frees all pins")


@pytest.mark.parametrize("prefix_tokens", [64, 320, 1280])
@pytest.mark.parametrize("beside", [0, 7], ids=["whole", "partial"])
def test_a_prefill_leg_takes_a_prefix_itself(cluster, pair, prefix_tokens, beside):
    router = cluster.router
    prefix = prompts.token_ids(prefix_tokens + beside)
    prompt = prefix + prompts.token_ids(50)
    with router.draining("d1"):
        cluster.hold([prefix])
        reference = log_probabilities.cold(router.complete, prompt)
        before = cluster.prefill_counts()
        answer = router.complete(prompt)
        log_probabilities.assert_exact(answer, reference)
    assert fetch_of(router, answer) == ("one_shot", "fetched")
    assert answer.cached_tokens == prefix_tokens
    told, counted = map(difference, cluster.prefill_counts(), before)
    assert told == counted
    expected = {"external_kv_transfer": prefix_tokens, "local_cache_hit": 0}
    assert counted == {**expected, "local_compute": len(prompt) - prefix_tokens}
    cluster.prefill_holds(prompt, reference)
    cluster.nothing_is_held(pair.prefill)


def test_prompts_of_every_length_take_their_prefixes_at_once(cluster, pair):
    """Of each prompt, all whole blocks but for the last token are taken, and the rest is computed."""
    router = cluster.router
    batch = [prompts.token_ids(length) for length in prompts.LENGTHS]
    references = cluster.references(batch)
    hits = list(map(full_hit, prompts.LENGTHS))
    with router.draining("d1"):
        cluster.hold(batch)
        before = cluster.prefill_counts()
        asked = [
            cluster.ask_all(batch[i : i + AT_A_TIME], references[i : i + AT_A_TIME])
            for i in range(0, len(batch), AT_A_TIME)
        ]
    assert [tokens for part in asked for tokens in part.cached_tokens] == hits
    ways = ["one_shot" if hit >= TAKEN_MIN else "two_step" for hit in hits]
    fetches = [fetch_of(router, answer) for part in asked for answer in part.answers]
    assert fetches == [(way, "fetched") for way in ways]
    told, counted = map(difference, cluster.prefill_counts(), before)
    in_two_steps = [hit for hit, way in zip(hits, ways) if way == "two_step"]
    # A fetch in two steps takes the prefix and one more token, and the leg finds it.
    steps = sum(in_two_steps) + len(in_two_steps)
    assert told == {**counted, "external_kv_transfer": counted["external_kv_transfer"] - steps}
    assert told["external_kv_transfer"] == sum(hits) - sum(in_two_steps)
    assert told["local_cache_hit"] == sum(in_two_steps)
    assert cluster.book.sent_twice() == []
    cluster.nothing_is_held(pair.prefill)


# The source of a prefix, or the prefill engine that takes it, is killed at a step.
STEPS = (
    "while the source is asked",
    "before the leg takes",
    "while the leg takes",
    "before decode pulls",
    "while decode pulls",
)
KILLS = tuple(itertools.product(("source", "fetcher"), STEPS))
TELLING = (("source", "before the leg takes"),)


@pytest.mark.parametrize(("victim", "step"), kills.chosen(KILLS, TELLING))
def test_an_engine_is_killed_around_a_one_shot_leg(cluster, pair, decode, victim, step):
    router = cluster.router
    # Engines that have failed take part in no fetch for a while.
    eventually(lambda: fetch(cluster), lambda seen: seen == ("one_shot", "fetched"), "one shot")
    prefix = prompts.token_ids(320)
    prompt = prefix + prompts.token_ids(50)
    cluster.hold([prefix])
    role, body = {
        "while the source is asked": ("decode", prompt[: len(prefix) + 1]),
        "before the leg takes": ("prefill", prompt),
        "while the leg takes": ("prefill", prompt),
        "before decode pulls": ("decode", prompt),
        "while decode pulls": ("decode", prompt),
    }[step]
    # The engine that is to send KV in this step, and does not; and the one that waits for it.
    sender, taker = {
        "while the leg takes": (pair.decode, pair.prefill),
        "while decode pulls": (pair.prefill, pair.decode),
    }.get(step, (None, None))
    killed, survivor = (pair.decode, pair.prefill)[:: 1 if victim == "source" else -1]
    with contextlib.ExitStack() as alone, cluster.book.fault(role, proxy.HOLD, body, 1) as fault:
        # The source is to decode, too.
        alone.enter_context(router.draining("d1"))
        with kills.Kill(cluster, killed, prompt) as kill:
            kills.happened(fault, step)
            alone.close()
            if sender:
                held = taker.blocks_in_use()
                with pair.frozen(sender):
                    fault.go.set()
                    eventually(taker.blocks_in_use, lambda blocks: blocks > held, step)
                    kill.strike()
            else:
                kill.strike()
                fault.go.set()
    assert kill.outcome.done, "another engine answers"
    cluster.nothing_is_held(survivor, decode, patience_s=kills.LEASE_S)
    # What the survivor has in its cache is right.
    log_probabilities.assert_exact(router.complete(prompt), kill.expected)
    kills.recover(cluster, killed)
    log_probabilities.assert_exact(router.complete(prompt), kill.expected)
