"""A pair joined by NIXL in push mode (`connector: nixl_push`): both legs are sent at once, and the prefill
engine writes the KV into the decode engine that has registered with it.

A decode engine that waits in vain keeps the blocks of its prompt until it is restarted, even after its
request was cancelled. A prefill engine keeps for half a minute what nobody has registered for: that this
ends is tested once, for what all tests before have left.
"""

import contextlib
import http.client
import json

import pytest

from support import dialects, pairs, prompts, proxy, witness
from support.engine import full_hit
from support.waiting import eventually

# At block boundaries and off them.
LENGTHS = (33, 34, 63, 64, 65, 96, 97, 500, 992, 993, 1000, 1900)
EVERY_TIME = 99


@pytest.fixture(scope="module")
def pair():
    with pairs.running("push", "PUSH") as pair:
        yield pair


@pytest.fixture(scope="module")
def cluster(pair):
    with pairs.cluster(pair, "nixl_push", alone=pair.decode) as cluster:
        # By now the router has asked both engines who they are, which would count as prompts.
        cluster.router.complete(prompts.token_ids(40))
        yield cluster


def is_pushed(cluster, answer):
    decision = cluster.router.decision(answer.request_id)
    assert (decision["prefill_worker"], decision["decode_worker"]) == ("p0", "d0"), decision


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_answers_are_exact_at_every_length_and_all_at_once(cluster, stream):
    batch = [prompts.token_ids(length) for length in LENGTHS]
    for cached in ([0] * len(LENGTHS), list(map(full_hit, LENGTHS))):
        asked = cluster.ask_all(batch, stream=stream)
        for answer in asked.answers:
            is_pushed(cluster, answer)
        # The prefill engine's figures. By its own, the decode engine has all of each prompt cached.
        assert asked.cached_tokens == cached
        assert asked.on_prefill["local_cache_hit"] == sum(cached)
        assert asked.on_prefill["local_compute"] == sum(LENGTHS) - sum(cached)
        assert asked.on_decode["local_compute"] == 0
        held = asked.on_decode["local_cache_hit"]
        assert asked.on_decode["external_kv_transfer"] == sum(LENGTHS) - held
    cluster.nothing_is_held(cluster.pair.decode)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_every_endpoint_and_several_samples_are_exact(cluster, stream):
    router = cluster.router
    messages = prompts.chat()
    chat = router.chat(messages, stream=stream)
    witness.assert_exact(chat, witness.cold(router.chat, messages))
    is_pushed(cluster, chat)
    prompt, sampled = prompts.token_ids(200), {"n": 2, "temperature": 0.9, "seed": 3}
    reference = witness.cold(router.complete, prompt, **sampled)
    samples = router.complete(prompt, stream=stream, **sampled)
    witness.assert_exact(samples, reference)
    is_pushed(cluster, samples)
    # An engine takes the id of a response from its body, and that of a message from the header.
    for dialect in (dialects.Responses(router), dialects.Messages(router)):
        said = prompts.text(repeat=8)
        answer = dialect.ask("Be brief.", said, stream=stream)
        alone = dialect.ask("Be brief.", said, model="tiny-aggregated")
        assert (answer.text, answer.prompt_tokens) == (alone.text, alone.prompt_tokens)
        is_pushed(cluster, answer)
    cluster.nothing_is_held(cluster.pair.decode)


@pytest.mark.parametrize("kind", [proxy.STATUS_503, proxy.RESET_BEFORE, proxy.HANG_UP])
def test_a_decode_leg_whose_prefill_fails_keeps_no_blocks(cluster, kind):
    prompt = prompts.token_ids(300)
    reference = witness.cold(cluster.router.complete, prompt)
    with cluster.book.fault("prefill", kind, prompt, times=1) as fault:
        witness.assert_exact(cluster.router.complete(prompt), reference)
    assert fault.fired == 1
    cluster.nothing_is_held(cluster.pair.decode)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_a_client_that_leaves_while_decode_waits_keeps_no_blocks(cluster, pair, stream):
    prompt = prompts.token_ids(300)
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 12, "stream": stream}
    with cluster.book.fault("prefill", proxy.HOLD, prompt, EVERY_TIME) as fault:
        connection = http.client.HTTPConnection(cluster.router.http.removeprefix("http://"))
        with contextlib.closing(connection):
            headers = {"content-type": "application/json"}
            connection.request("POST", "/v1/completions", json.dumps(body), headers)
            eventually(pair.decode.kv_usage, bool, "the decode engine waits")
            eventually(lambda: fault.fired, bool, "the prefill leg")
        eventually(cluster.router.requests_in_flight, lambda count: count == 0, "the request")
        assert pair.decode.kv_usage() > 0
        fault.go.set()
        cluster.nothing_is_held(cluster.pair.decode)
    assert cluster.hand_offs("stranded") == 0
    cluster.ask_all([prompt])


def test_engines_that_are_killed_while_decode_waits_and_come_back(cluster, pair):
    router, book = cluster.router, cluster.book
    cluster.nothing_is_held()
    # What waits for a prefill engine that is gone cannot be freed, and is counted. Decode computes.
    prompt = prompts.token_ids(300)
    reference = witness.cold(router.complete, prompt)
    with book.fault("prefill", proxy.HOLD, prompt, EVERY_TIME) as fault:
        asked = cluster.ask_later(prompt)
        eventually(lambda: fault.fired, bool, "the prefill leg")
        eventually(pair.decode.kv_usage, bool, "the decode engine waits")
        pair.crash(pair.prefill)
        fault.go.set()
        witness.assert_exact(asked.result(), reference)
    eventually(lambda: cluster.hand_offs("stranded"), lambda now: now == 1, "the count")
    assert stranded_legs(router) == 1
    assert pair.decode.kv_usage() > 0
    pair.again(pair.prefill)
    cluster.all_up()
    # Its new identity is learned.
    asked = cluster.ask_all([prompts.token_ids(300), prompts.token_ids(64)])
    for answer in asked.answers:
        is_pushed(cluster, answer)
    # A decode engine that comes back holds nothing.
    pair.crash(pair.decode)
    cluster.is_known_to_be_down("d0")
    pair.again(pair.decode)
    cluster.all_up()
    assert stranded_legs(router) == 0
    is_pushed(cluster, cluster.ask_all([prompts.token_ids(300)]).answers[0])
    cluster.nothing_is_held(pair.decode)


def stranded_legs(router):
    (legs,) = [worker["stranded_legs"] for worker in router.workers() if worker["id"] == "d0"]
    return legs
