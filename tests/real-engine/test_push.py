"""A pair joined by NIXL in push mode (`connector: nixl_push`): both legs are sent at once, and the prefill
engine writes the KV into the decode engine that has registered with it.

A decode engine that waits in vain keeps the blocks of its prompt until it is restarted, even after its
request was cancelled. A prefill engine keeps for half a minute what nobody has registered for: that this
ends is tested once, for what all tests before have left.
"""

import contextlib
import itertools
import threading

import pytest

from support import dialects, kills, log_probabilities, pairs, prompts, proxy
from support.both_legs import EVERY_TIME, BothLegsAtOnce, took_both_legs
from support.waiting import eventually


@pytest.fixture(scope="module")
def pair():
    with pairs.running("push", "PUSH") as pair:
        yield pair


@pytest.fixture(scope="module")
def cluster(pair, decode):
    with pairs.cluster(pair, "nixl_push", decode) as cluster:
        # By now the router has asked both engines who they are, which would count as prompts.
        cluster.router.complete(prompts.token_ids(40))
        yield cluster


class TestBothLegs(BothLegsAtOnce):
    pass


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_every_endpoint_and_several_samples_are_exact(cluster, stream):
    router = cluster.router
    messages = prompts.chat()
    chat = router.chat(messages, stream=stream)
    log_probabilities.assert_exact(chat, log_probabilities.cold(router.chat, messages))
    took_both_legs(cluster, chat)
    prompt, sampled = prompts.token_ids(200), {"n": 2, "temperature": 0.9, "seed": 3}
    reference = log_probabilities.cold(router.complete, prompt, **sampled)
    samples = router.complete(prompt, stream=stream, **sampled)
    log_probabilities.assert_exact(samples, reference)
    took_both_legs(cluster, samples)
    # An engine takes the id of a response from its body, and that of a message from the header.
    for dialect in (dialects.Responses(router), dialects.Messages(router)):
        said = prompts.text(repeat=8)
        answer = dialect.ask("Be brief.", said, stream=stream)
        alone = dialect.ask("Be brief.", said, **dialects.alone())
        assert (answer.text, answer.prompt_tokens) == (alone.text, alone.prompt_tokens)
        dialects.assert_exact(answer, alone, stream)
        took_both_legs(cluster, answer)
    cluster.nothing_is_held(cluster.pair.decode)


STEPS = ("before the legs", "decode waits", "prefill is done", "streaming")
KILLS = tuple(itertools.product(("prefill", "decode"), STEPS))
TELLING = (("prefill", "decode waits"),)


@pytest.mark.parametrize(("victim", "step"), kills.chosen(KILLS, TELLING))
def test_an_engine_is_killed_during_a_push(cluster, pair, victim, step):
    cluster.nothing_is_held()
    prompt, killed = prompts.token_ids(300), getattr(pair, victim)
    stranded, given = cluster.hand_offs("stranded"), len(cluster.book.given)
    begun = threading.Event()
    stream = {"stream": True, "max_tokens": 600, "at_first": begun.set} if step == "streaming" else {}
    held_legs = {
        "before the legs": ("prefill", "decode"),
        "decode waits": ("prefill",),
        "prefill is done": ("decode",),
        "streaming": (),
    }[step]
    with contextlib.ExitStack() as stack:
        faults = [
            stack.enter_context(cluster.book.fault(role, proxy.HOLD, prompt, EVERY_TIME))
            for role in held_legs
        ]
        kill = stack.enter_context(kills.Kill(cluster, killed, prompt, **stream))
        for fault in faults:
            kills.happened(fault, step)
        if step == "decode waits":
            eventually(pair.decode.kv_usage, bool, step)
        elif step == "prefill is done":
            eventually(lambda: len(cluster.book.given), lambda now: now > given, step)
        elif step == "streaming":
            assert begun.wait(60), step
        kill.strike()
        for fault in faults:
            fault.go.set()
    eventually(cluster.router.requests_in_flight, lambda count: count == 0, "the request")
    if victim == "decode":
        assert not kill.outcome.done, "no other decode engine can answer"
        cluster.nothing_is_held(pair.prefill, patience_s=kills.LEASE_S)
        kills.recover(cluster, killed)
        return
    # Decode computes, or has its KV already. What waits for a prefill engine that is gone cannot be
    # freed, and is counted.
    assert kill.outcome.done

    def held():
        return pair.decode.kv_usage() > 0, cluster.hand_offs("stranded") - stranded

    is_held, count = eventually(held, lambda now: not now[0] or now[1] == 1, "held and counted")
    print(f"held by decode: {is_held}, counted: {count}")
    assert is_held == (step == "decode waits") or step in ("before the legs", "prefill is done")
    pair.again(killed)
    cluster.all_up()
    # Its new identity is learned.
    for answer in cluster.ask_all([prompts.token_ids(300), prompts.token_ids(64)]).answers:
        took_both_legs(cluster, answer)
    if is_held:
        assert stranded_legs(cluster.router) == 1
        # A decode engine that comes back holds nothing.
        pair.crash(pair.decode)
        cluster.is_known_to_be_down("d0")
        kills.recover(cluster, pair.decode)
    assert stranded_legs(cluster.router) == 0


def stranded_legs(router):
    (legs,) = [worker["stranded_legs"] for worker in router.workers() if worker["id"] == "d0"]
    return legs
