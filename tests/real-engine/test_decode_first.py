"""Decode first on engines that do not know the field: the router's index is the gate."""

import httpx
import pytest

from support import prompts
from support import router as routers
from support.engine import BLOCK_SIZE, full_hit
from support.waiting import eventually
from support.log_probabilities import assert_exact, cold

MAX_TOKENS = 12


@pytest.fixture(scope="module")
def router(start_router, prefill, decode):
    workers = [routers.worker("p0", "prefill", prefill), routers.worker("d0", "decode", decode)]
    with start_router("decode-first", workers, flow="decode_first") as router:
        yield router


def alone(router, prompt):
    return cold(router.complete, prompt, max_tokens=MAX_TOKENS)


def test_the_engines_are_asked_and_do_not_honour_the_field(router):
    def known():
        workers = httpx.get(f"{router.admin}/admin/workers", timeout=30).json()["workers"]
        return {w["id"]: w["supports_cache_hit_threshold"] for w in workers if w["model"] == "tiny"}

    eventually(known, lambda known: known == {"p0": False, "d0": False}, "what engines honour")


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_the_four_requests_of_the_threshold_proposal(router, stream):
    base = prompts.token_ids(320)
    # Shared with the first, all, threshold, what comes of it: shares of 0, 0.28, 0.34, 0.41.
    # The last one has the default of 0.8.
    requests = [
        (320, 320, 0, "served"),
        (96, 342, 0.33, "skipped"),
        (128, 380, 0.33, "served"),
        (160, 390, None, "skipped"),
    ]
    for shared, total, threshold, outcome in requests:
        prompt = base[:shared] + prompts.token_ids(total - shared)
        body = {} if threshold is None else {"cache_hit_threshold": threshold}
        with router.indexing("d0", (total - shared) // BLOCK_SIZE):
            answer = router.complete(
                prompt, max_tokens=MAX_TOKENS, stream=stream, extra_body=body
            )
        assert answer.finish_reasons == {0: "length"}
        assert_exact(answer, alone(router, prompt))
        record = router.decision(answer.request_id)
        assert record["decode_try"] == outcome
        assert record["gate"] == ("none" if threshold == 0 else "router")
        assert record["cache_hit_threshold"] == (0.8 if threshold is None else threshold)
        assert (record["prefill_worker"] is None) == (outcome == "served")
        assert answer.usage.prompt_tokens == total
        if outcome == "served":
            assert answer.cached_tokens == (0 if shared == total else full_hit(shared + 1))


def test_a_prompt_handed_over_is_served_by_decode_alone_the_next_time(router, prefill):
    prompt = prompts.token_ids(500)
    with router.indexing("d0", 500 // BLOCK_SIZE):
        first = router.complete(prompt, max_tokens=MAX_TOKENS)
    before = prefill.prompt_tokens_by_source()
    again = router.complete(prompt, max_tokens=MAX_TOKENS)
    expected = alone(router, prompt)
    assert_exact(first, expected)
    assert_exact(again, expected)
    assert router.decision(again.request_id)["decode_try"] == "served"
    assert again.cached_tokens == full_hit(500)
    assert prefill.prompt_tokens_by_source() == before
