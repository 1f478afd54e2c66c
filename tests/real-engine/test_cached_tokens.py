"""`usage` tells the truth about the prefix cache: it is the prefill engine's own figure."""

import pytest

from support import log_probabilities, prompts
from support.engine import full_hit
from support.waiting import eventually

ENDPOINTS = pytest.mark.parametrize("endpoint", ["completions", "chat"])
STREAM = pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])


def asker(router, endpoint):
    return {"completions": router.complete, "chat": router.chat}[endpoint]


def ask(router, endpoint, prompt, **kwargs):
    return asker(router, endpoint)(prompt, **kwargs)


def new_prompt(endpoint):
    return prompts.text() if endpoint == "completions" else prompts.chat()


def growth(engine, before, prompt_tokens):
    """What the engine counted since `before`, once it has counted the whole prompt."""

    def since():
        now = engine.prompt_tokens_by_source()
        return {source: now[source] - before[source] for source in now}

    return eventually(
        since, lambda counts: sum(counts.values()) >= prompt_tokens, "the engine's token count"
    )


@ENDPOINTS
@STREAM
def test_cold_is_zero_and_warm_is_every_block_but_the_last_token(
    router, prefill, endpoint, stream
):
    prompt = new_prompt(endpoint)
    cold = ask(router, endpoint, prompt, stream=stream)
    warm = ask(router, endpoint, prompt, stream=stream)

    tokens = cold.usage.prompt_tokens
    assert tokens > 64, "a prompt of several blocks"
    assert warm.usage.prompt_tokens == tokens
    assert (cold.cached_tokens, warm.cached_tokens) == (0, full_hit(tokens))
    reference = log_probabilities.cold(asker(router, endpoint), prompt)
    log_probabilities.assert_exact(cold, reference)
    log_probabilities.assert_exact(warm, reference)


@ENDPOINTS
@STREAM
@pytest.mark.parametrize("temperature", ["cold", "warm"])
def test_the_figure_is_the_prefill_engines_own(router, prefill, endpoint, stream, temperature):
    prompt = new_prompt(endpoint)
    if temperature == "warm":
        ask(router, endpoint, prompt)
    before = prefill.prompt_tokens_by_source()
    answer = ask(router, endpoint, prompt, stream=stream)

    tokens = answer.usage.prompt_tokens
    assert growth(prefill, before, tokens) == {
        "local_cache_hit": answer.cached_tokens,
        "local_compute": tokens - answer.cached_tokens,
        "external_kv_transfer": 0,
    }


@pytest.mark.parametrize("prompt_tokens", [33, 64, 65, 288, 1000])
def test_lengths_around_a_block_boundary(router, prompt_tokens):
    prompt = prompts.token_ids(prompt_tokens)
    cold, warm = router.complete(prompt), router.complete(prompt)
    assert cold.usage.prompt_tokens == prompt_tokens
    assert (cold.cached_tokens, warm.cached_tokens) == (0, full_hit(prompt_tokens))


def test_a_prompt_that_extends_a_cached_one_hits_the_common_blocks(router):
    shared = prompts.token_ids(100)
    router.complete(shared)
    assert router.complete(shared + prompts.token_ids(60)).cached_tokens == 96


def test_a_salt_has_a_cache_of_its_own(router):
    prompt = prompts.token_ids(200)
    for salt in ("tenant-a", "tenant-b"):
        salted = {"extra_body": {"cache_salt": salt}}
        cold, warm = router.complete(prompt, **salted), router.complete(prompt, **salted)
        assert (cold.cached_tokens, warm.cached_tokens) == (0, full_hit(200)), salt
    assert router.complete(prompt).cached_tokens == 0, "no salt is not any salt"


@ENDPOINTS
def test_a_stream_that_does_not_ask_for_usage_has_none(router, endpoint):
    answer = ask(router, endpoint, new_prompt(endpoint), stream=True, stream_options={})
    assert answer.text
    assert answer.usages == []


@ENDPOINTS
def test_a_stream_that_asks_for_usage_has_one_with_cached_tokens(router, endpoint):
    answer = ask(router, endpoint, new_prompt(endpoint), stream=True)
    (usage,) = answer.usages
    assert usage.prompt_tokens_details.cached_tokens == 0
    assert usage.completion_tokens == 8
