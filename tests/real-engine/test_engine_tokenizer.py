"""`tokenizer: engine`: the router has no files of the model, and vLLM's `/tokenize` makes its tokens."""

import os
import pathlib

import pytest

from support import log_probabilities, prompts
from support import router as routers
from support.engine import BLOCK_SIZE, full_hit
from support.waiting import eventually

# A busy machine may answer late; what then happens is no matter of these tests.
TOKENIZER = "{ kind: engine, timeout: 60s }"


@pytest.fixture(scope="module")
def router(prefill, decode):
    yaml = routers.five_lines(TOKENIZER, prefill, decode)
    folder = pathlib.Path(os.environ["SPLITRAIL_TEST_LOGS"]) / "engine-tokenizer"
    with routers.running(os.environ["SPLITRAIL_BIN"], yaml, folder) as router:
        eventually(router.is_ready, bool, "the router is ready")
        yield router


def tokenized(router, source):
    return router.metrics().sum("splitrail_engine_tokenized_prompts_total", source=source)


@pytest.mark.parametrize("endpoint", ["completions", "chat"])
def test_a_prompt_has_the_engines_tokens_and_is_found_in_its_cache(
    router, prefill, decode, endpoint
):
    prompt = prompts.text(repeat=8) if endpoint == "completions" else prompts.chat(repeat=6)
    ask = {"completions": router.complete, "chat": router.chat}[endpoint]
    body = {"completions": {"prompt": prompt}, "chat": {"messages": prompt}}[endpoint]
    tokens = len(prefill.tokenize(**body))
    assert tokens > 4 * BLOCK_SIZE, "a prompt of several blocks"
    alone = {"cache_hit_threshold": 0}
    reference = log_probabilities.cold(ask, prompt, model="tiny", extra_body=alone)

    asked, kept = tokenized(router, "engine"), tokenized(router, "kept")
    first = ask(prompt)
    record = router.decision(first.request_id)
    assert (record["prompt_tokens"], record["prompt_unknown"]) == (tokens, None)
    assert record["prompt_blocks"] == tokens // BLOCK_SIZE
    assert (first.usage.prompt_tokens, first.cached_tokens) == (tokens, 0)
    assert tokenized(router, "engine") == asked + 1

    def again():
        before = decode.prompt_tokens_by_source()
        answer = ask(prompt)
        return answer, router.decision(answer.request_id), before

    # The gate opens on blocks of the engine's events alone: their tokens are those of the prompt.
    warm, record, before = eventually(
        again, lambda found: found[1]["decode_try"] == "served", "the decode worker serves alone"
    )
    assert record["gate"] == "router"
    assert (warm.usage.prompt_tokens, warm.cached_tokens) == (tokens, full_hit(tokens))
    counted = eventually(
        lambda: decode.prompt_tokens_by_source()["local_cache_hit"] - before["local_cache_hit"],
        lambda hits: hits >= warm.cached_tokens,
        "the engine's count of cached tokens",
    )
    assert counted == warm.cached_tokens
    assert tokenized(router, "engine") == asked + 1, "a repeated prompt is not asked about again"
    assert tokenized(router, "kept") > kept
    log_probabilities.assert_exact(first, reference)
    log_probabilities.assert_exact(warm, reference)


def test_every_prompt_had_tokens_and_no_engine_counts_others(router):
    # Nothing but an engine could say what the tokens of a canary are.
    assert {worker["parity"] for worker in router.workers()} == {"unknown"}
    assert all(worker["kv_routing"] for worker in router.workers())
    metrics = router.metrics()
    assert metrics.sum("splitrail_untokenized_prompts_total") == 0
    assert metrics.sum("splitrail_prompt_length_mismatches_total") == 0
