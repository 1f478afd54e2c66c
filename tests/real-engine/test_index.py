"""What the router believes, written down before the engine answers, is what then happens."""

import pytest

from support import prompts
from support.engine import BLOCK_SIZE

KINDS = pytest.mark.parametrize("kind", sorted(prompts.TEXTS))


def assert_same_tokens(router, ask, engine_ids):
    """The router's tokens are the engine's.

    The count could agree by chance. The overlap cannot: the index holds hashes
    of the ids in the engine's events, and the router looks up its own ids.
    """
    blocks = len(engine_ids) // BLOCK_SIZE
    assert blocks >= 2, "a prompt of several blocks"
    with router.indexing("p0", blocks):
        first = ask()
    second = ask()
    assert first.usage.prompt_tokens == len(engine_ids)
    assert router.decision(first.request_id)["prompt_tokens"] == len(engine_ids)
    assert router.decision(first.request_id)["overlap_blocks"] == 0
    assert router.decision(second.request_id)["overlap_blocks"] == blocks


@KINDS
def test_text_gets_the_engines_tokens(router, prefill, kind):
    prompt = prompts.text(kind)
    ids = prefill.tokenize(prompt=prompt)
    assert_same_tokens(router, lambda: router.complete(prompt, max_tokens=1), ids)


@KINDS
def test_chat_gets_the_engines_tokens(router, prefill, kind):
    messages = prompts.chat(kind)
    ids = prefill.tokenize(messages=messages)
    assert_same_tokens(router, lambda: router.chat(messages, max_tokens=1), ids)


@pytest.mark.parametrize("prompt_tokens", [64, 65, 95, 320, 1000])
def test_the_estimate_is_what_the_engine_then_reports(router, prompt_tokens):
    prompt = prompts.token_ids(prompt_tokens)
    with router.indexing("p0", prompt_tokens // BLOCK_SIZE):
        cold = router.complete(prompt)
    warm = router.complete(prompt)
    for answer in (cold, warm):
        record = router.decision(answer.request_id)
        assert record["model"] == "tiny"
        assert record["flow"] == "prefill_first"
        assert (record["prefill_worker"], record["decode_worker"]) == ("p0", "d0")
        assert record["prompt_tokens"] == prompt_tokens
        assert record["estimated_cached_tokens"] == answer.cached_tokens
    assert warm.cached_tokens > 0


def test_another_salt_is_no_overlap(router):
    prompt = prompts.token_ids(200)
    with router.indexing("p0", 200 // BLOCK_SIZE):
        router.complete(prompt, extra_body={"cache_salt": "a"})
    other = router.complete(prompt, extra_body={"cache_salt": "b"})
    same = router.complete(prompt, extra_body={"cache_salt": "a"})
    assert router.decision(other.request_id)["overlap_blocks"] == 0
    assert router.decision(same.request_id)["overlap_blocks"] == 200 // BLOCK_SIZE


def test_records_name_no_token_ids(router):
    prompt = prompts.token_ids(100)
    answer = router.complete(prompt)
    record = str(router.decision(answer.request_id))
    assert ", ".join(map(str, prompt[:4])) not in record
