"""`/inference/v1/generate`: token ids in, token ids out, over a real hand-off."""

import json
import secrets

import pytest

from support import log_probabilities, prompts
from support.engine import full_hit


def steps(choices):
    return {choice["index"]: choice["steps"] for choice in choices}


def ask(router, prompt, model="tiny", stream=False, salt=None, **sampling):
    body = {
        "model": model,
        "token_ids": prompt,
        "sampling_params": {
            "max_tokens": 8,
            "temperature": 0,
            "ignore_eos": True,
            **log_probabilities.GENERATE,
            **sampling,
        },
        "cache_salt": salt,
    }
    if stream:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    reply = router.post("/inference/v1/generate", json=body)
    assert reply.status_code == 200, reply.text
    if not stream:
        choices = reply.json()["choices"]
        for choice in choices:
            choice["steps"] = log_probabilities.steps(choice["logprobs"])
        return reply, choices, reply.json()["usage"]
    data = [line[6:] for line in reply.text.splitlines() if line.startswith("data: ")]
    assert data.pop() == "[DONE]"
    chunks = [json.loads(chunk) for chunk in data]
    usages = [chunk["usage"] for chunk in chunks if chunk["usage"]]
    assert len(usages) == 1
    choices = {}
    for choice in (choice for chunk in chunks for choice in chunk["choices"]):
        so_far = choices.setdefault(choice["index"], {**choice, "token_ids": [], "steps": []})
        so_far["token_ids"] += choice["token_ids"]
        so_far["steps"] += log_probabilities.steps(choice["logprobs"])
        so_far["finish_reason"] = choice["finish_reason"] or so_far["finish_reason"]
    return reply, [choices[index] for index in sorted(choices)], usages[0]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_a_pair_gives_the_tokens_of_one_engine(router, stream):
    prompt = prompts.token_ids(200)
    _, alone, _ = ask(router, prompt, model="tiny-aggregated", salt=secrets.token_hex(8))
    for cached in (0, full_hit(200)):
        reply, choices, usage = ask(router, prompt, stream=stream)
        assert "flow=prefill_first" in reply.headers["x-splitrail-route"]
        assert [c["token_ids"] for c in choices] == [alone[0]["token_ids"]]
        log_probabilities.assert_exact(steps(choices), steps(alone))
        assert choices[0]["finish_reason"] == "length"
        assert usage["prompt_tokens"] == 200 and usage["completion_tokens"] == 8
        assert usage["prompt_tokens_details"]["cached_tokens"] == cached
        assert "remote_host" not in reply.text


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_several_samples(router, stream):
    prompt = prompts.token_ids(100)
    sampled = {"n": 2, "temperature": 0.9, "seed": 5}
    salt = secrets.token_hex(8)
    _, alone, _ = ask(router, prompt, model="tiny-aggregated", salt=salt, **sampled)
    _, choices, usage = ask(router, prompt, stream=stream, **sampled)
    assert [c["token_ids"] for c in choices] == [c["token_ids"] for c in alone]
    log_probabilities.assert_exact(steps(choices), steps(alone))
    assert usage["prompt_tokens"] == 100 and usage["completion_tokens"] == 16


def test_one_token_is_the_prefill_engine_s_own(router, decode):
    prompt = prompts.token_ids(100)
    before = decode.generated_tokens()
    reply, choices, usage = ask(router, prompt, max_tokens=1)
    assert "prefill=p0" in reply.headers["x-splitrail-route"]
    assert "decode=" not in reply.headers["x-splitrail-route"]
    assert len(choices[0]["token_ids"]) == usage["completion_tokens"] == 1
    assert decode.generated_tokens() == before
