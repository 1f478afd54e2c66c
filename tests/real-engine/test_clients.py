"""Clients that err, leave, or mean harm."""

import concurrent.futures
import contextlib
import json
import os

import httpx
import openai
import pytest

from support import log_probabilities, prompts, proxy
from support import router as routers
from support.router import unreachable_worker, worker
from support.waiting import eventually

# Sent straight to a vLLM decode server in a NIXL pair, this ends the server.
POISON = {"kv_transfer_params": {"do_remote_prefill": True}}


def test_an_unknown_model_is_not_found(router):
    with pytest.raises(openai.NotFoundError) as caught:
        router.complete("hello", model="nobody")
    assert "nobody" in caught.value.body["message"]


def test_a_prompt_beyond_the_context_is_a_bad_request(router):
    with pytest.raises(openai.BadRequestError) as caught:
        router.complete(prompts.token_ids(3000))
    assert caught.value.body["message"]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("body", ['{"model": "tiny",', "[]", ""], ids=["cut", "array", "empty"])
def test_a_malformed_body_is_a_bad_request(router, path, body):
    reply = router.post(path, content=body, headers={"content-type": "application/json"})
    assert reply.status_code == 400
    assert reply.json()["error"].keys() >= {"message", "type", "param", "code"}


@pytest.mark.parametrize("model", ["tiny", "tiny-aggregated"])
@pytest.mark.parametrize(
    "fields",
    [
        POISON,
        {"vllm_xargs": POISON},
        {"extra_args": POISON},
        {"sampling_params": POISON},
        {"sampling_params": {"extra_args": POISON}},
        {"vllm_xargs": {"kv_transfer_params": json.dumps(POISON["kv_transfer_params"])}},
    ],
    ids=["top", "vllm_xargs", "extra_args", "sampling_params", "nested", "as text"],
)
def test_hand_off_fields_of_a_client_reach_no_engine(router, prefill, decode, model, fields):
    harmless, harmful = prompts.token_ids(100), prompts.token_ids(100)
    expected = log_probabilities.cold(router.complete, harmful)
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        bystander = pool.submit(router.complete, harmless, max_tokens=40, stream=True)
        reply = router.post(
            "/v1/completions",
            json={
                "model": model,
                "prompt": harmful,
                "max_tokens": 8,
                "temperature": 0,
                "ignore_eos": True,
                **log_probabilities.COMPLETION,
                **fields,
            },
        )
        assert reply.status_code == 200, reply.text
        steps = log_probabilities.steps(reply.json()["choices"][0]["logprobs"])
        log_probabilities.assert_exact({0: steps}, expected)
        assert not reply.json().get("kv_transfer_params"), "a hand-off is nobody's business"
        assert bystander.result().usage.completion_tokens == 40
    assert prefill.is_healthy() and decode.is_healthy()
    assert router.complete(prompts.token_ids(100)).usage.completion_tokens == 8


# Bodies of every endpoint that generates, by path.
BODIES = {
    "/v1/completions": {"prompt": "a b c " * 20},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "a b c " * 20}], "max_tokens": 4},
    "/v1/responses": {"input": "a b c " * 20, "max_output_tokens": 4},
    "/v1/messages": {"messages": [{"role": "user", "content": "a b c " * 20}], "max_tokens": 4},
    "/inference/v1/generate": {"token_ids": [5, 6, 7] * 20, "sampling_params": {"max_tokens": 4}},
}
MARK = "sent-by-a-client"
MARKED = {"kv_transfer_params": {"do_remote_prefill": True, "remote_engine_id": MARK}}


@pytest.mark.parametrize("path", BODIES)
def test_engines_see_no_hand_off_fields_of_clients_at_any_endpoint(marked_router, path):
    router, book = marked_router
    for model in ("tiny", "tiny-aggregated"):
        for fields in (
            MARKED,
            {"vllm_xargs": MARKED},
            {"extra_args": MARKED},
            {"vllm_xargs": {"kv_transfer_params": json.dumps(MARKED["kv_transfer_params"])}},
            {"sampling_params": {**BODIES[path].get("sampling_params", {}), **MARKED}},
            {"sampling_params": {**BODIES[path].get("sampling_params", {}), "extra_args": MARKED}},
        ):
            reply = router.post(path, json={"model": model, **BODIES[path], **fields})
            assert reply.status_code == 200, (model, fields, reply.text)
    assert book.passed > 0
    assert book.marked == [], "a client's fields reached an engine"


@pytest.fixture(scope="module")
def marked_router(prefill, decode, logs):
    """A router with a proxy before each engine that looks for the mark, and the proxies' book."""
    book = proxy.Book(mark=MARK)
    with contextlib.ExitStack() as stack:
        proxies = {"p0": proxy.Proxy(prefill, "prefill", book)}
        proxies["d0"] = proxy.Proxy(decode, "decode", book)
        proxies["a0"] = proxy.Proxy(decode, "decode", book)
        for its in proxies.values():
            stack.callback(its.close)
        roles = {"p0": "prefill", "d0": "decode"}
        workers = [worker(id, role, proxies[id]) for id, role in roles.items()]
        yaml = routers.config(os.environ["SPLITRAIL_MODEL_PATH"], proxies["a0"], workers)
        folder = logs / "marked"
        yield stack.enter_context(routers.running(os.environ["SPLITRAIL_BIN"], yaml, folder)), book


@pytest.mark.parametrize("model", ["tiny", "tiny-aggregated"])
def test_a_client_that_leaves_frees_everything(router, prefill, decode, model):
    asked_tokens = 1500
    generated = decode.generated_tokens()
    body = {
        "model": model,
        "prompt": prompts.token_ids(200),
        "max_tokens": asked_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
    }
    with httpx.stream("POST", f"{router.http}/v1/completions", json=body, timeout=120) as reply:
        assert reply.status_code == 200
        # Kept: the response closes with its last reference to this iterator.
        lines = reply.iter_lines()
        assert next(lines).startswith("data: ")
        eventually(decode.running_requests, lambda running: running == 1, "the running request")
        assert router.requests_in_flight() == 1

    for engine in (prefill, decode):
        eventually(engine.running_requests, lambda running: running == 0, "running requests")
        eventually(engine.kv_usage, lambda usage: usage == 0, "KV in use")
    eventually(router.requests_in_flight, lambda count: count == 0, "requests in flight")
    # It was ended, and did not just come to its end.
    assert decode.generated_tokens() - generated < asked_tokens


def test_a_prefill_worker_that_is_gone_costs_no_request(start_router, prefill, decode):
    workers = [
        unreachable_worker("gone", "prefill"),
        worker("p0", "prefill", prefill),
        worker("d0", "decode", decode),
    ]
    with start_router("one-prefill-gone", workers, policy="round_robin") as router:
        for _ in range(4):
            prompt = prompts.token_ids(100)
            log_probabilities.assert_exact(router.complete(prompt), log_probabilities.cold(router.complete, prompt))
