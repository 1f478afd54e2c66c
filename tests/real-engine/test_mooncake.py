"""A pair joined by Mooncake over TCP (`connector: mooncake`): both legs are sent at once, and the prefill
engine pushes the KV to the decode engine that waits for it.

A decode engine that waits in vain keeps the blocks of its prompt for eight minutes, even after its
request was cancelled. So where a test waits for the end of a use of blocks, it waits for the router.
"""

import pytest

from support import log_probabilities, pairs, prompts, proxy
from support.both_legs import EVERY_TIME, BothLegsAtOnce
from support.engine import full_hit
from support.waiting import eventually


@pytest.fixture(scope="module")
def pair():
    with pairs.running("mooncake", "MOONCAKE") as pair:
        yield pair


@pytest.fixture(scope="module")
def cluster(pair, decode):
    with pairs.cluster(pair, "mooncake", decode, bootstrap=pair.prefill.bootstrap) as cluster:
        yield cluster


class TestBothLegs(BothLegsAtOnce):
    pass


def test_a_chat_and_several_samples_are_exact(cluster):
    router = cluster.router
    messages = prompts.chat()
    log_probabilities.assert_exact(router.chat(messages), log_probabilities.cold(router.chat, messages))
    prompt, sampled = prompts.token_ids(200), {"n": 2, "temperature": 0.9, "seed": 3}
    reference = log_probabilities.cold(router.complete, prompt, **sampled)
    log_probabilities.assert_exact(router.complete(prompt, **sampled), reference)
    cluster.nothing_is_held()


def test_a_prompt_that_both_engines_have_in_part_is_exact(cluster):
    beginning = prompts.token_ids(300)
    cluster.ask_all([beginning])
    asked = cluster.ask_all([beginning + prompts.token_ids(100)])
    assert asked.cached_tokens == [asked.on_prefill["local_cache_hit"]] == [full_hit(300)]
    assert asked.on_decode["external_kv_transfer"] == 400 - asked.on_decode["local_cache_hit"]


def test_engines_that_are_killed_while_decode_waits_and_come_back(cluster, pair):
    router, book = cluster.router, cluster.book
    prompt = prompts.token_ids(300)
    reference = log_probabilities.cold(router.complete, prompt)
    # A decode engine that is gone waits for nothing: the prefill engine does not keep the blocks for it.
    with book.fault("prefill", proxy.HOLD, prompt, EVERY_TIME) as fault:
        asked = cluster.ask_later(prompt)
        eventually(pair.decode.kv_usage, bool, "the decode engine waits")
        eventually(lambda: fault.fired, bool, "the prefill leg")
        pair.crash(pair.decode)
        assert asked.exception() is not None, "no other decode worker can answer"
        cluster.is_known_to_be_down("d0")
        eventually(lambda: fault.given_up == fault.fired, bool, "the router gives up the prefill leg")
        fault.go.set()
        cluster.nothing_is_held(pair.prefill)
    pair.again(pair.decode)
    cluster.all_up()
    cluster.ask_all([prompt])
    # What waits for a prefill engine that is gone cannot be freed, and is counted. Decode computes.
    prompt = prompts.token_ids(300)
    reference = log_probabilities.cold(router.complete, prompt)
    left = cluster.hand_offs("left")
    with book.fault("prefill", proxy.HOLD, prompt, EVERY_TIME) as fault:
        asked = cluster.ask_later(prompt)
        eventually(lambda: fault.fired, bool, "the prefill leg")
        pair.crash(pair.prefill)
        fault.go.set()
        log_probabilities.assert_exact(asked.result(), reference)
    eventually(lambda: cluster.hand_offs("left"), lambda now: now > left, "the count")
    pair.again(pair.prefill)
    cluster.all_up()
    asked = cluster.ask_all([prompts.token_ids(300)])
    assert router.decision(asked.answers[0].request_id)["flow"] == "prefill_first"
    cluster.nothing_is_held(pair.prefill)
