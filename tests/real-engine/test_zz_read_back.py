"""Prefill legs read KV from a real decode engine, exactly.

What the decode engine has generated is read back by the next turn's prefill leg, and prefixes that it
holds are taken by prefill legs themselves (one shot).
"""

import os
import pathlib
import random
import secrets

import pytest

from support import kills, outcome, pairs, prompts, proxy, witness
from support import router as routers
from support.engine import BLOCK_SIZE, full_hit
from support.pairs import difference
from support.waiting import eventually, settled

ANSWER = 100
SEED = "hash_seed: 5318008\n"
MODEL = (
    "read_back: true",
    "read_back_pin: 240s",
    # These engines compute faster than they read; here they read nevertheless.
    "costs: { hand_off_base_ms: 0, kv_bytes_per_token: 1, prefill_us_per_token: 1000000 }",
)


@pytest.fixture(scope="module")
def pair():
    with pairs.running("bidirectional", "BIDIRECTIONAL") as pair:
        yield pair


@pytest.fixture(scope="module")
def start(pair):
    """Starts a router that reads back: `with start(name) as router`."""
    prefill, decode = pair.engines
    workers = [routers.worker("p0", "prefill", prefill), routers.worker("d0", "decode", decode)]

    def start(name, *more):
        model_path = os.environ["SPLITRAIL_MODEL_PATH"]
        yaml = routers.config(model_path, decode, workers, top=SEED, more=[*MODEL, *more])
        folder = pathlib.Path(os.environ["SPLITRAIL_TEST_LOGS"]) / name
        return routers.running(os.environ["SPLITRAIL_BIN"], yaml, folder)

    return start


class Reply:
    def __init__(self, reply):
        assert reply.status_code == 200, reply.text
        body = reply.json()
        (choice,) = body["choices"]
        self.request_id = reply.headers["x-request-id"]
        self.ids = choice["token_ids"]
        self.steps = {choice["index"]: witness.steps(choice["logprobs"])}
        self.cached = body["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert body["kv_transfer_params"] is None, "clients do not see where KV is"


def ask(router, ids, max_tokens=ANSWER, **more):
    body = {"model": "tiny", "prompt": ids, "max_tokens": max_tokens, "temperature": 0}
    body |= {"ignore_eos": True, "return_token_ids": True, **witness.COMPLETION, **more}
    return Reply(router.post("/v1/completions", json=body))


def ask_cold(router, ids, max_tokens=ANSWER):
    return ask(router, ids, max_tokens, cache_salt=secrets.token_hex(8))


def reads(router, outcome):
    return router.metrics().sum("splitrail_read_backs_total", model="tiny", outcome=outcome)


def parity(router):
    """By it, the router has sent the prompts of its own that engines would count."""
    workers = (worker for worker in router.workers() if worker["id"] in ("p0", "d0"))
    return {worker["id"]: worker["parity"] for worker in workers}


def test_in_ten_turns_prefill_computes_the_questions_and_reads_the_answers(pair, start):
    prefill, decode = pair.engines
    # No pin is released meanwhile: that would cost the prefill engine a token that is counted here.
    with start("ten-turns", "read_back_pinned_percent_max: 90") as router:
        eventually(lambda: parity(router), lambda seen: seen == {"p0": "ok", "d0": "ok"}, "parity")
        history, before = [], 0
        for turn in range(10):
            history += prompts.token_ids(40)
            known = (before - 1) // BLOCK_SIZE * BLOCK_SIZE if turn else 0
            counts = prefill.prompt_tokens_by_source()
            with router.indexing("p0", (len(history) - known) // BLOCK_SIZE):
                reply = ask(router, history)
            counted = difference(prefill.prompt_tokens_by_source(), counts)
            assert counted["local_compute"] == len(history) - known, (turn, counted)
            assert counted["local_cache_hit"] + counted["external_kv_transfer"] == known
            assert reply.cached == known
            record = router.decision(reply.request_id)["ledger"]["legs"][0]
            assert record.get("read_back", 0) == counted["external_kv_transfer"], record
            assert record["local_compute"] == counted["local_compute"], record
            witness.assert_exact(reply, ask_cold(router, history))
            history += reply.ids
            before = len(history)
        assert (reads(router, "read"), reads(router, "failed")) == (9, 0)
        (worker,) = (w for w in router.workers() if w["id"] == "d0")
        assert worker["keeps_for_read_back"] is True
    eventually(decode.kv_usage, lambda usage: usage == 0, "a router that stops frees all pins")


def test_a_history_that_was_edited_anywhere_is_answered_as_by_a_cold_engine(start):
    choose = random.Random(secrets.randbits(64))
    with start("edited") as router:
        for _ in range(8):
            first = prompts.token_ids(choose.randrange(40, 200))
            history = first + ask(router, first).ids
            kept = choose.randrange(len(first) - 30, len(history))
            edited = history[:kept] + prompts.token_ids(choose.randrange(20, 150))
            reply = ask(router, edited, 12)
            witness.assert_exact(reply, ask_cold(router, edited, 12))
            # Nothing wrong may be left in the prefill engine's cache either.
            witness.assert_exact(ask(router, edited, 12), ask_cold(router, edited, 12))
        assert (reads(router, "failed"), reads(router, "mismatch")) == (0, 0)


def test_pins_that_will_not_be_read_are_released(pair, start):
    decode = pair.decode
    eventually(decode.kv_usage, lambda usage: usage == 0, "blocks of other tests")
    # One percent of the engine's blocks: less than a conversation of ten blocks has.
    with start("bound", "read_back_pinned_percent_max: 1") as router:
        for _ in range(5):
            ask(router, prompts.token_ids(200))
        eventually(decode.kv_usage, lambda usage: usage == 0, "pinned blocks are freed")
        released = router.metrics().sum("splitrail_read_back_releases_total", outcome="released")
        assert released == 5


def test_what_a_fetch_leaves_pinned_is_freed_by_the_decode_engine(pair, decode):
    """The second step of a peer fetch is a leg with a hand-off: these engines keep its blocks pinned."""
    eventually(pair.decode.kv_usage, lambda usage: usage == 0, "blocks of other tests")
    costs = "costs: { fetch_base_ms: 0, prefill_us_per_token: 1000000 }"
    fetching = ("peer_fetch: two_step", "peer_fetch_min_tokens: 1", "queue: none", costs)
    options = {"name": "read-back-fetch", "policy": "predicted_ttft", "top": SEED}
    with pairs.cluster(pair, "nixl", decode, more=(*MODEL[:2], *fetching), **options) as cluster:
        router, prefix = cluster.router, prompts.token_ids(320)
        with router.indexing("d0", len(prefix) // BLOCK_SIZE):
            body = {"model": "tiny", "prompt": prefix, "max_tokens": 1}
            assert pair.decode.post("/v1/completions", body).status_code == 200
        prompt = prefix + prompts.token_ids(50)
        witness.assert_exact(router.complete(prompt), witness.cold(router.complete, prompt))
        # Much earlier than the pin ends; what decode keeps is for the next turn.
        cluster.nothing_is_held(pair.prefill)
        metrics = router.metrics()
        assert metrics.sum("splitrail_peer_fetches_total", outcome="fetched") == 1
        assert metrics.sum("splitrail_read_back_releases_total", outcome="released") == 1


@pytest.fixture(scope="module")
def cluster(pair, decode):
    """With a second decode engine, which keeps nothing pinned."""
    options = {"name": "read-back", "top": SEED, "spare": decode}
    more = (*MODEL, "read_back_pinned_percent_max: 90")
    with pairs.cluster(pair, "nixl", decode, more=more, **options) as cluster:
        yield cluster


def test_conversations_of_every_length_go_on_at_once(cluster, pair):
    """Of each answer, prefill computes what is in no whole block."""
    eventually(pair.decode.kv_usage, lambda usage: usage == 0, "blocks of other tests")
    histories = [prompts.token_ids(length) for length in prompts.LENGTHS]
    router, blocks = cluster.router, sum(length // BLOCK_SIZE for length in prompts.LENGTHS)
    with router.draining("d1"):
        with router.indexing("p0", blocks):
            said = cluster.map(lambda history: ask(router, history).ids, histories)
        batch = [
            history + ids + prompts.token_ids(10 + at % BLOCK_SIZE)
            for at, (history, ids) in enumerate(zip(histories, said))
        ]
        references = cluster.references(batch)
        asked = cluster.ask_all(batch, references)
    known = [(length + ANSWER - 1) // BLOCK_SIZE * BLOCK_SIZE for length in prompts.LENGTHS]
    assert asked.cached_tokens == known
    assert asked.on_prefill["local_compute"] == sum(map(len, batch)) - sum(known)
    assert asked.told_prefill == asked.on_prefill
    assert asked.told_decode == asked.on_decode
    assert reads(router, "read") == len(batch)
    assert (reads(router, "failed"), reads(router, "mismatch")) == (0, 0)
    cluster.nothing_is_held(pair.prefill)


KILLS = (("decode", "before the read"), ("decode", "in the read"), ("prefill", "in the read"))
TELLING = (("decode", "before the read"), ("prefill", "in the read"))


@pytest.mark.parametrize(("victim", "step"), kills.chosen(KILLS, TELLING))
def test_an_engine_is_killed_during_a_read(cluster, pair, decode, victim, step):
    killed, survivor = (pair.prefill, pair.decode)[:: 1 if victim == "prefill" else -1]
    router = cluster.router
    with router.draining("d1"):
        one, other = [prompts.token_ids(100) for _ in range(2)]
        one, other = [
            history + ask(router, history).ids + prompts.token_ids(40) for history in (one, other)
        ]
    cluster.nothing_is_held(pair.prefill)
    with cluster.book.fault("prefill", proxy.HOLD, one, times=1) as fault:
        with kills.Kill(cluster, killed, one) as kill:
            kills.happened(fault, step)
            if step == "in the read":
                # The engine that is to send does not.
                with pair.frozen(pair.decode):
                    fault.go.set()
                    eventually(pair.prefill.kv_usage, bool, "the read has begun")
                    kill.strike()
            else:
                kill.strike()
                fault.go.set()
    assert kill.outcome.done, "another engine answers"
    pair.again(killed)
    cluster.all_up()
    # What the engine that was killed had pinned, or what it had, is read no more; later pins are.
    for history in (one, other):
        reply = ask(router, history)
        witness.assert_exact(reply, ask_cold(router, history))
        history = history + reply.ids + prompts.token_ids(20)
        witness.assert_exact(ask(router, history, 12), ask_cold(router, history, 12))
    cluster.nothing_is_held(pair.prefill, decode, patience_s=kills.LEASE_S)
    assert cluster.book.sent_twice() == []


TAKING = (
    *MODEL[:2],
    "read_back_pinned_percent_max: 90",
    "peer_fetch: one_shot",
    "kv_load_failure_policy: fail",
    "peer_fetch_min_tokens: 1",
    "peer_fetch_max_per_worker: 32",
    # These engines compute faster than they fetch; here they fetch nevertheless.
    "costs: { fetch_base_ms: 0, prefill_us_per_token: 20000 }",
    "queue: none",
)
# Engines compute what is shorter.
TAKEN_MIN = 64


def hold(cluster, prefixes):
    """Lets the decode engine compute prefixes, of which the router learns from its events."""
    blocks = sum(len(prefix) // BLOCK_SIZE for prefix in prefixes)
    with cluster.router.indexing("d0", blocks):
        for prefix in prefixes:
            body = {"model": "tiny", "prompt": prefix, "max_tokens": 1}
            assert cluster.pair.decode.post("/v1/completions", body).status_code == 200


def fetch_of(router, answer):
    """The way and the outcome of the fetch of an answer's request."""
    record = router.decision(answer.request_id)["fetch"]
    return record["way"], record["outcome"]


def prefill_counts(cluster):
    """What the ledger says of prefill legs, and the prefill engine's own tokens by source."""
    counted = settled(cluster.pair.prefill.prompt_tokens_by_source)
    return cluster.router.prompt_tokens_by_source("prefill"), counted


@pytest.fixture(scope="module")
def taking(pair, decode):
    """A router whose prefill legs take prefixes from the decode engine, with a second decode engine."""
    more = (*TAKING, "timeouts: { peer_fetch: 60s }")
    options = {"name": "one-shot", "policy": "predicted_ttft", "top": SEED, "spare": decode}
    with pairs.cluster(pair, "nixl", decode, more=more, **options) as cluster:
        with cluster.router.draining("d1"):
            # Its reply shows that the decode engine has the flag.
            cluster.router.complete(prompts.token_ids(50))
            # The first fetch takes two steps, and shows that the prefill engine has it as well.
            prefix = prompts.token_ids(320)
            hold(cluster, [prefix])
            answer = cluster.router.complete(prefix + prompts.token_ids(20))
            assert fetch_of(cluster.router, answer) == ("two_step", "fetched")
            # The decode engine frees what the fetch has left pinned.
            cluster.nothing_is_held(pair.prefill)
        yield cluster
    eventually(pair.decode.kv_usage, lambda usage: usage == 0, "a router that stops frees all pins")


@pytest.mark.parametrize("prefix_tokens", [64, 320, 1280])
@pytest.mark.parametrize("beside", [0, 7], ids=["whole", "partial"])
def test_a_prefill_leg_takes_a_prefix_itself(taking, pair, prefix_tokens, beside):
    router = taking.router
    prefix = prompts.token_ids(prefix_tokens + beside)
    prompt = prefix + prompts.token_ids(50)
    with router.draining("d1"):
        hold(taking, [prefix])
        reference = witness.cold(router.complete, prompt)
        before = prefill_counts(taking)
        answer = router.complete(prompt)
        witness.assert_exact(answer, reference)
    assert fetch_of(router, answer) == ("one_shot", "fetched")
    assert answer.cached_tokens == prefix_tokens
    told, counted = map(difference, prefill_counts(taking), before)
    assert told == counted
    expected = {"external_kv_transfer": prefix_tokens, "local_cache_hit": 0}
    assert counted == {**expected, "local_compute": len(prompt) - prefix_tokens}

    # What is in the prefill engine's cache now is right for everyone.
    body = outcome.body(prompt, stream=False, max_tokens=8)
    hit = pair.prefill.post("/v1/completions", body).json()
    assert hit["usage"]["prompt_tokens_details"]["cached_tokens"] == full_hit(len(prompt))
    witness.assert_exact({0: witness.steps(hit["choices"][0]["logprobs"])}, reference)
    taking.nothing_is_held(pair.prefill)


def test_prompts_of_every_length_take_their_prefixes_at_once(taking, pair):
    """Of each prompt, all whole blocks but for the last token are taken, and the rest is computed."""
    router = taking.router
    batch = [prompts.token_ids(length) for length in prompts.LENGTHS]
    references = taking.references(batch)
    hits = list(map(full_hit, prompts.LENGTHS))
    with router.draining("d1"):
        hold(taking, batch)
        before = prefill_counts(taking)
        asked = taking.ask_all(batch, references)
    assert asked.cached_tokens == hits
    ways = ["one_shot" if hit >= TAKEN_MIN else "two_step" for hit in hits]
    assert [fetch_of(router, answer) for answer in asked.answers] == [
        (way, "fetched") for way in ways
    ]
    told, counted = map(difference, prefill_counts(taking), before)
    in_two_steps = [hit for hit, way in zip(hits, ways) if way == "two_step"]
    # A fetch in two steps takes the prefix and one more token, and the leg finds it.
    steps = sum(in_two_steps) + len(in_two_steps)
    assert told == {**counted, "external_kv_transfer": counted["external_kv_transfer"] - steps}
    assert told["external_kv_transfer"] == sum(hits) - sum(in_two_steps)
    assert told["local_cache_hit"] == sum(in_two_steps)
    assert taking.book.sent_twice() == []
    taking.nothing_is_held(pair.prefill)


def test_the_source_of_a_prefix_is_killed_before_the_leg_takes_it(taking, pair, decode):
    router = taking.router
    prefix = prompts.token_ids(320)
    prompt = prefix + prompts.token_ids(50)
    hold(taking, [prefix])
    with taking.book.fault("prefill", proxy.HOLD, prompt, times=1) as fault:
        with kills.Kill(taking, pair.decode, prompt) as kill:
            kills.happened(fault, "the leg carries the hand-off")
            kill.strike()
            fault.go.set()
    assert kill.outcome.done, "the prompt is computed, and another engine answers"
    failed = router.metrics().sum("splitrail_peer_fetches_total", way="one_shot", outcome="failed")
    assert failed == 1
    pair.again(pair.decode)
    taking.all_up()
    answer, reference = router.complete(prompt), witness.cold(router.complete, prompt)
    witness.assert_exact(answer, reference)
    taking.nothing_is_held(pair.prefill, decode, patience_s=kills.LEASE_S)
    assert taking.book.sent_twice() == []
