"""What a real decode engine has generated is read back by the next turn's prefill leg, exactly."""

import os
import pathlib
import random
import secrets

import pytest

from support import kills, pairs, prompts, proxy, witness
from support import router as routers
from support.engine import BLOCK_SIZE
from support.pairs import difference
from support.waiting import eventually

ANSWER = 100
SEED = "hash_seed: 5318008\n"
MODEL = (
    "read_back: true",
    "read_back_pin: 240s",
    # These engines compute faster than they read; here they read nevertheless.
    "costs: { hand_off_base_ms: 0, kv_bytes_per_token: 1, prefill_us_per_token: 1000000 }",
)


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
        cluster.hold([prefix])
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
