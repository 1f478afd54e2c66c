"""Batches of prompts and several choices, which one hand-off cannot serve."""

import pytest

from support import prompts
from support.engine import full_hit

STREAM = pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])


@STREAM
@pytest.mark.parametrize("lengths", [(100, 200), (40, 300, 65)], ids=["two", "three"])
def test_a_batch_is_its_single_requests_in_order(router, lengths, stream):
    batch = [prompts.token_ids(length) for length in lengths]
    together = router.complete(batch, stream=stream)
    singles = [router.complete(prompt, model="tiny-aggregated") for prompt in batch]

    assert sorted(together.texts) == list(range(len(batch)))
    assert [together.texts[i] for i in range(len(batch))] == [single.text for single in singles]
    assert together.finish_reasons == {i: "length" for i in range(len(batch))}
    assert together.usage.prompt_tokens == sum(lengths)
    assert together.usage.completion_tokens == 8 * len(batch)
    assert together.usage.total_tokens == sum(lengths) + 8 * len(batch)


def test_cached_tokens_of_a_batch_are_the_sum(router):
    warm, cold = prompts.token_ids(200), prompts.token_ids(100)
    router.complete(warm)
    assert router.complete([warm, cold]).cached_tokens == full_hit(200)


def test_a_batch_of_texts(router):
    batch = [prompts.text("code"), prompts.text("cjk")]
    together = router.complete(batch)
    for index, prompt in enumerate(batch):
        assert together.texts[index] == router.complete(prompt).text


@STREAM
def test_several_choices_come_from_one_worker(router, decode, stream):
    transferred = decode.prompt_tokens_by_source()["external_kv_transfer"]
    answer = router.complete(prompts.token_ids(100), n=2, temperature=0.9, stream=stream)
    assert sorted(answer.texts) == [0, 1]
    assert answer.finish_reasons == {0: "length", 1: "length"}
    assert answer.usage.prompt_tokens == 100
    assert answer.usage.completion_tokens == 16
    assert router.decision(answer.request_id)["flow"] == "aggregated"
    assert decode.prompt_tokens_by_source()["external_kv_transfer"] == transferred
