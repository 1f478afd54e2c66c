"""Batches of prompts and several choices, which one hand-off alone cannot serve."""

import concurrent.futures
import secrets

import pytest

from support import prompts
from support.engine import BLOCK_SIZE, full_hit
from support.waiting import eventually
from support.log_probabilities import assert_exact, cold

STREAM = pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])


@STREAM
@pytest.mark.parametrize("lengths", [(100, 200), (40, 300, 65)], ids=["two", "three"])
def test_a_batch_is_its_single_requests_in_order(router, lengths, stream):
    batch = [prompts.token_ids(length) for length in lengths]
    together = router.complete(batch, stream=stream)
    singles = [cold(router.complete, prompt) for prompt in batch]

    assert sorted(together.texts) == list(range(len(batch)))
    assert [together.texts[i] for i in range(len(batch))] == [single.text for single in singles]
    assert_exact(together, {i: single.steps[0] for i, single in enumerate(singles)})
    assert together.finish_reasons == {i: "length" for i in range(len(batch))}
    assert together.usage.prompt_tokens == sum(lengths)
    assert together.usage.completion_tokens == 8 * len(batch)
    assert together.usage.total_tokens == sum(lengths) + 8 * len(batch)


def test_cached_tokens_of_a_batch_are_the_sum(router):
    warm, other = prompts.token_ids(200), prompts.token_ids(100)
    router.complete(warm)
    assert router.complete([warm, other]).cached_tokens == full_hit(200)


def test_a_batch_of_texts(router):
    batch = [prompts.text("code"), prompts.text("cjk")]
    singles = [cold(router.complete, prompt) for prompt in batch]
    assert_exact(
        router.complete(batch), {i: single.steps[0] for i, single in enumerate(singles)}
    )


MAX_TOKENS = 24


def three(router, prompt):
    """Token ids of three samples, each by the likeliest token: vLLM refuses to give that
    thrice by temperature 0. Equal likelihoods, of which this model has many, are drawn."""
    body = {"model": "tiny", "prompt": prompt, "n": 3, "max_tokens": MAX_TOKENS}
    body |= {"temperature": 0.9, "top_k": 1, "ignore_eos": True, "return_token_ids": True}
    reply = router.post("/v1/completions", json=body)
    assert reply.status_code == 200, reply.text
    assert "flow=prefill_first" in reply.headers["x-splitrail-route"]
    usage = reply.json()["usage"]
    assert usage["prompt_tokens"] == len(prompt)
    assert usage["completion_tokens"] == 3 * MAX_TOKENS
    choices = reply.json()["choices"]
    assert [choice["index"] for choice in choices] == [0, 1, 2]
    return [choice["token_ids"] for choice in choices], usage


def assert_likeliest(router, prompt, answer):
    """Every token of an answer is the likeliest after those before it, or nearly: by an
    engine that computes all of it anew. With another prompt's KV none would be."""
    body = {"model": "tiny-aggregated", "prompt": prompt + answer, "max_tokens": 1}
    body |= {"prompt_logprobs": 1, "cache_salt": secrets.token_hex(8)}
    reply = router.post("/v1/completions", json=body)
    assert reply.status_code == 200, reply.text
    tokens = reply.json()["choices"][0]["prompt_logprobs"][len(prompt) :]
    assert len(tokens) == len(answer)
    for token, likely in zip(answer, tokens):
        best = max(entry["logprob"] for entry in likely.values())
        # A few of the steps in which bfloat16 tells such numbers apart.
        assert likely[str(token)]["logprob"] >= best - 0.5, (token, likely)


def test_several_choices_take_one_hand_off(router, decode):
    prompt = prompts.token_ids(100)
    before = decode.prompt_tokens_by_source()
    answers, usage = three(router, prompt)
    assert usage["prompt_tokens_details"]["cached_tokens"] == 0
    # The hand-off is fetched once; each sample finds it in the decode engine's cache.
    grown = eventually(
        lambda: {k: v - before[k] for k, v in decode.prompt_tokens_by_source().items()},
        lambda grown: sum(grown.values()) >= 400,
        "the decode engine's count of four requests",
    )
    assert grown["external_kv_transfer"] == 100
    assert grown["local_cache_hit"] == 3 * full_hit(100)
    for answer in answers:
        assert_likeliest(router, prompt, answer)
    with pytest.raises(AssertionError):
        assert_likeliest(router, prompts.token_ids(100), answers[0])


@STREAM
def test_samples_with_a_seed_are_those_of_one_engine(router, stream):
    prompt = prompts.token_ids(100)
    sampled = {"n": 2, "temperature": 0.9, "seed": 11, "max_tokens": MAX_TOKENS}
    one = cold(router.complete, prompt, **sampled)
    samples = router.complete(prompt, stream=stream, **sampled)
    assert samples.texts == one.texts
    assert_exact(samples, one)


def test_what_the_engine_refuses_reaches_the_client(router, prefill):
    reply = router.post(
        "/v1/completions",
        json={"model": "tiny", "prompt": prompts.token_ids(100), "n": 2, "temperature": 0},
    )
    assert reply.status_code == 400, reply.text
    assert "greedy" in reply.json()["error"]["message"]
    eventually(prefill.kv_usage, lambda usage: usage == 0, "KV in use on prefill")


def test_several_choices_under_eviction_pressure(router, prefill, decode):
    """More prompts than either engine has blocks for: whatever is evicted between the fetch
    and the samples is computed again, and nothing stays pinned."""
    prompt_tokens = 1500
    count = decode.kv_blocks() * BLOCK_SIZE // prompt_tokens * 3 // 2
    batch = [prompts.token_ids(prompt_tokens) for _ in range(count)]
    with concurrent.futures.ThreadPoolExecutor(count) as pool:
        replies = list(pool.map(lambda prompt: three(router, prompt), batch))
    for prompt, (answers, _) in zip(batch, replies):
        for answer in answers:
            assert_likeliest(router, prompt, answer)
    for engine in (prefill, decode):
        eventually(engine.kv_usage, lambda usage: usage == 0, f"KV in use on {engine.port}")
