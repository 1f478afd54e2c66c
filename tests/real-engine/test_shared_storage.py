"""A pair that shares a folder (`connector: shared_storage`, vLLM's ExampleConnector): the prefill engine
writes the KV of a prompt before it replies, and the decode engine reads it.

Prompts are found whole, up to their last whole block, under whatever salt: a reference that one of these
engines computed would be read from the folder. It is computed by the decode engine of the other pair.
"""

import pytest

from support import log_probabilities, pairs, prompts, proxy
from support.engine import BLOCK_SIZE, full_hit
from support.waiting import eventually

# At block boundaries and off them. Of a prompt with one token more than whole blocks, reader and writer
# take another block for the last one, so that nothing is found.
LENGTHS = (33, 34, 63, 64, 65, 66, 96, 500, 992, 993, 1000, 1900)
# One that an engine has itself, while the folder has the blocks before its last one, ends the engine.
# Of this length that may be so: of any prompt of one block at most, the folder has no block.
ONLY_ONCE = 33


def stored(tokens):
    """Tokens that the other engine reads of a prompt that one has written."""
    return 0 if tokens % BLOCK_SIZE == 1 else full_hit(tokens)


@pytest.fixture(scope="module")
def pair():
    with pairs.running("shared_storage", "STORAGE") as pair:
        yield pair


@pytest.fixture(scope="module")
def cluster(pair, decode):
    with pairs.cluster(pair, "shared_storage", decode) as cluster:
        yield cluster


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_answers_are_exact_at_every_length_and_all_at_once(cluster, stream):
    batch = [prompts.token_ids(length) for length in LENGTHS]
    cold = cluster.ask_all(batch, stream=stream)
    assert cold.cached_tokens == [0] * len(batch)
    assert cold.on_prefill["local_compute"] == sum(LENGTHS)
    assert cold.on_decode["external_kv_transfer"] == sum(map(stored, LENGTHS))
    assert cold.on_decode["local_compute"] == sum(LENGTHS) - sum(map(stored, LENGTHS))
    # Once more, when both engines have the blocks themselves.
    batch = [prompt for prompt in batch if len(prompt) != ONLY_ONCE]
    hits = [full_hit(len(prompt)) for prompt in batch]
    warm = cluster.ask_all(batch, stream=stream)
    assert warm.cached_tokens == hits
    assert warm.on_prefill["local_cache_hit"] == sum(hits)
    cluster.nothing_is_held()


def test_a_chat_is_exact(cluster):
    for kind in ("code", "cjk"):
        messages = prompts.chat(kind)
        reference = log_probabilities.cold(cluster.router.chat, messages)
        log_probabilities.assert_exact(cluster.router.chat(messages), reference)


def test_the_client_is_told_what_the_prefill_engine_had(cluster, pair):
    """What it reads from the folder counts, because it does not compute it."""
    tokens = 200
    prompt = prompts.token_ids(tokens)
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 1}
    assert pair.decode.post("/v1/completions", body).status_code == 200
    asked = cluster.ask_all([prompt])
    found = {"external_kv_transfer": stored(tokens), "local_cache_hit": 0}
    assert asked.on_prefill == {**found, "local_compute": tokens - stored(tokens)}
    assert asked.cached_tokens == [stored(tokens)]


def test_a_longer_prompt_finds_nothing_of_its_beginning_in_the_folder_and_is_exact(cluster):
    beginning = prompts.token_ids(200)
    cluster.ask_all([beginning])
    asked = cluster.ask_all([beginning + prompts.token_ids(100)])
    # Both engines have the beginning themselves. Decode reads the rest of what prefill has written.
    assert asked.on_prefill["local_compute"] == 300 - full_hit(200)
    assert asked.on_decode["external_kv_transfer"] == stored(300) - full_hit(200)


def test_engines_that_are_killed_between_the_legs_and_come_back(cluster, pair):
    router, book = cluster.router, cluster.book
    prompt = prompts.token_ids(300)
    reference = log_probabilities.cold(router.complete, prompt)
    with book.fault("prefill", proxy.HOLD, prompt, 99) as fault:
        asked = cluster.ask_later(prompt)
        eventually(lambda: fault.fired, bool, "the prefill leg")
        pair.crash(pair.prefill)
        fault.go.set()
        # The decode engine computes it.
        log_probabilities.assert_exact(asked.result(), reference)
    cluster.nothing_is_held(pair.decode)
    with book.fault("decode", proxy.HOLD, prompt, 99) as fault:
        asked = cluster.ask_later(prompt)
        eventually(lambda: fault.fired, bool, "the decode leg")
        pair.crash(pair.decode)
        fault.go.set()
        assert asked.exception() is not None, "nobody is left to answer"
    pair.again(*pair.engines)
    cluster.all_up()
    fresh = prompts.token_ids(300)
    asked = cluster.ask_all([fresh])
    assert asked.cached_tokens == [0]
    assert router.decision(asked.answers[0].request_id)["flow"] == "prefill_first"
    # What was written before is still there.
    log_probabilities.assert_exact(router.complete(prompt), reference)
    cluster.nothing_is_held()
