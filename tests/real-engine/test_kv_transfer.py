"""The KV cache really moves from prefill to decode, as much as the router says."""

import pytest

from support import prompts
from support.engine import full_hit
from support.waiting import eventually


class Counts:
    """Prompt tokens by source on both legs, as the engines and as the router count them."""

    def __init__(self, router, prefill, decode):
        self._read = lambda: {
            "prefill engine": prefill.prompt_tokens_by_source(),
            "decode engine": decode.prompt_tokens_by_source(),
            "prefill leg": router.prompt_tokens_by_source("prefill"),
            "decode leg": router.prompt_tokens_by_source("decode"),
        }
        self._before = self._read()

    def _growth(self):
        return {
            place: {source: now - self._before[place][source] for source, now in counts.items()}
            for place, counts in self._read().items()
        }

    def after(self, prompt_tokens):
        """Growth since the start, once everybody has counted one prompt of this length."""
        return eventually(
            self._growth,
            lambda places: all(sum(c.values()) >= prompt_tokens for c in places.values()),
            "the token counts",
        )


@pytest.fixture
def counts(router, prefill, decode):
    return lambda: Counts(router, prefill, decode)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_a_cold_prompt_is_computed_on_prefill_and_transferred_whole(router, counts, stream):
    count = counts()
    router.complete(prompts.token_ids(200), stream=stream)
    grown = count.after(200)

    computed = {"local_compute": 200, "local_cache_hit": 0, "external_kv_transfer": 0}
    received = {"local_compute": 0, "local_cache_hit": 0, "external_kv_transfer": 200}
    assert grown["prefill engine"] == grown["prefill leg"] == computed
    assert grown["decode engine"] == grown["decode leg"] == received


def test_a_warm_prompt_is_transferred_but_for_what_decode_still_holds(router, counts):
    prompt = prompts.token_ids(200)
    with router.indexing("p0", 6), router.indexing("d0", 6):
        router.complete(prompt)
    count = counts()
    router.complete(prompt)
    grown = count.after(200)

    assert grown["prefill engine"] == grown["prefill leg"]
    assert grown["prefill engine"]["local_cache_hit"] == full_hit(200)
    assert grown["decode engine"] == grown["decode leg"]
    assert grown["decode engine"]["local_compute"] == 0
    assert grown["decode engine"]["local_cache_hit"] > 0


def test_a_short_prompt_stays_on_decode(router, counts, prefill):
    before = prefill.prompt_tokens_by_source()
    answer = router.complete(prompts.token_ids(20))
    assert answer.usage.prompt_tokens == 20
    assert router.decision(answer.request_id)["flow"] == "aggregated"
    assert prefill.prompt_tokens_by_source() == before


def test_a_finished_request_leaves_no_block_in_use(router, prefill, decode):
    router.complete(prompts.token_ids(500))
    for engine in (prefill, decode):
        eventually(engine.kv_usage, lambda usage: usage == 0, f"KV in use on {engine.port}")
