"""`/v1/responses` and `/v1/messages` through the official clients and the real pair.

The same conversation is asked as a chat, as a response and as a message: the engine makes the
same prompt of all three, so that counts and texts can be compared.
"""

import secrets

import anthropic
import httpx
import openai
import pytest

from support import dialects, prompts
from support.engine import BLOCK_SIZE, full_hit
from support.waiting import eventually
from support.log_probabilities import assert_exact, cold

DIALECTS = pytest.mark.parametrize("dialect", [dialects.Responses, dialects.Messages])
STREAM = pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])


def conversation(kind="code"):
    return f"You are terse. Case {secrets.token_hex(8)}.", prompts.TEXTS[kind] * 3


def assert_same(router, dialect, system, text, answers, stream):
    """The answers are that of one engine which computes the prompt alone."""
    expected = dialect(router).ask(system, text, **dialects.alone())
    assert expected.text and expected.cached_tokens == 0
    for answer in answers:
        assert answer.text == expected.text
        dialects.assert_exact(answer, expected, stream)


@DIALECTS
@STREAM
def test_cold_is_zero_and_warm_is_every_block_but_the_last_token(router, prefill, dialect, stream):
    system, text = conversation()
    messages = [{"role": "system", "content": system}, {"role": "user", "content": text}]
    tokens = len(prefill.tokenize(messages=messages))
    blocks = tokens // BLOCK_SIZE
    with router.indexing("p0", blocks):
        first = dialect(router).ask(system, text, stream=stream)
    warm = dialect(router).ask(system, text, stream=stream)
    assert (first.prompt_tokens, warm.prompt_tokens) == (tokens, tokens)
    assert (first.cached_tokens, warm.cached_tokens) == (0, full_hit(tokens))
    assert first.completion_tokens == warm.completion_tokens
    assert_same(router, dialect, system, text, [first, warm], stream)
    # The router knew the very tokens: the count could agree by chance, the overlap cannot.
    records = [router.decision(answer.request_id) for answer in (first, warm)]
    for record in records:
        assert record["prompt_tokens"] == tokens
        assert (record["flow"], record["local_reason"]) == ("prefill_first", None)
        assert (record["prefill_worker"], record["decode_worker"]) == ("p0", "d0")
    assert [record["overlap_blocks"] for record in records] == [0, blocks]


@DIALECTS
@STREAM
def test_a_pair_s_answer_is_that_of_one_engine(router, dialect, stream):
    system, text = conversation()
    answer = dialect(router).ask(system, text, stream=stream)
    assert_same(router, dialect, system, text, [answer], stream)
    # The same tokens as a chat, for which there are log-probabilities.
    messages = [{"role": "system", "content": system}, {"role": "user", "content": text}]
    to_the_end = {"extra_body": {"ignore_eos": False}}
    chat = router.chat(messages, **to_the_end)
    assert_exact(chat, cold(router.chat, messages, **to_the_end))
    assert chat.text == answer.text


@DIALECTS
def test_the_kv_cache_moves(router, decode, dialect):
    before = decode.prompt_tokens_by_source()["external_kv_transfer"]
    answer = dialect(router).ask(*conversation())
    eventually(
        lambda: decode.prompt_tokens_by_source()["external_kv_transfer"] - before,
        lambda grown: grown == answer.prompt_tokens,
        "the tokens that decode has received",
    )


@DIALECTS
def test_figures_of_a_single_engine_are_its_own(router, dialect):
    system, text = conversation()
    for salt in ("a", "b"):
        asked = dict(model="tiny-aggregated", cache_salt=salt + secrets.token_hex(4))
        first = dialect(router).ask(system, text, **asked)
        warm = dialect(router).ask(system, text, stream=True, **asked)
        assert warm.prompt_tokens == first.prompt_tokens
        assert (first.cached_tokens, warm.cached_tokens) == (0, full_hit(first.prompt_tokens))


CONVERSATIONS = {
    "turns": [
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "two"},
        {"role": "user", "content": [{"text": "three " * 40}, {"text": "four"}]},
    ],
    "an answer in parts": [
        {"role": "user", "content": "one " * 60},
        {"role": "assistant", "content": [{"text": "two"}]},
        {"role": "user", "content": [{"text": "three"}]},
    ],
    "hard text": [{"role": "user", "content": "".join(prompts.TEXTS.values())}],
}


@DIALECTS
@pytest.mark.parametrize("turns", CONVERSATIONS.values(), ids=CONVERSATIONS)
def test_conversations_get_the_engines_tokens(router, dialect, turns):
    system, _ = conversation()
    with router.indexing("p0", 2):
        first = dialect(router).ask(system, turns, max_tokens=2)
    record = router.decision(first.request_id)
    assert record["prompt_tokens"] == first.prompt_tokens
    again = dialect(router).ask(system, turns, max_tokens=2)
    record = router.decision(again.request_id)
    assert record["overlap_blocks"] == first.prompt_tokens // BLOCK_SIZE


def test_tools_of_a_message_get_the_engines_tokens(router):
    system, text = conversation()
    turns = [
        {"role": "user", "content": text},
        {
            "role": "assistant",
            "content": [
                {"type": "text", "text": "Let me look."},
                {"type": "tool_use", "id": "t1", "name": "look", "input": {"at": [1, 2.5], "x": "é"}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "found"}]},
                {"type": "text", "text": "And now?"},
            ],
        },
    ]
    tool = {"name": "look", "description": "Looks.", "input_schema": {"properties": {"at": {}}}}
    for overlap in (False, True):
        with router.indexing("p0", 0):
            answer = dialects.Messages(router).ask(
                system, turns, max_tokens=2, tools=[tool], tool_choice={"type": "none"}
            )
        record = router.decision(answer.request_id)
        assert record["prompt_tokens"] == answer.prompt_tokens
        assert record["overlap_blocks"] == (answer.prompt_tokens // BLOCK_SIZE if overlap else 0)
        eventually(
            lambda: router.index_blocks("p0"),
            lambda blocks: blocks >= answer.prompt_tokens // BLOCK_SIZE,
            "the index",
        )


def test_the_official_client_counts_a_message_s_tokens(router, decode):
    system, text = conversation()
    turns = [
        {"role": "user", "content": text},
        {"role": "assistant", "content": [{"type": "text", "text": "Let me look."}]},
        {"role": "user", "content": [{"type": "text", "text": "And now?"}]},
    ]
    tool = {"name": "look", "description": "Looks.", "input_schema": {"properties": {"at": {}}}}
    for more in ({}, {"tools": [tool], "tool_choice": {"type": "none"}}):
        asked = dict(model="tiny", system=system, messages=turns, **more)
        counted = router.anthropic.messages.count_tokens(**asked)
        served = router.anthropic.messages.create(**asked, max_tokens=2).usage
        assert counted.input_tokens == served.input_tokens + (
            served.cache_read_input_tokens + (served.cache_creation_input_tokens or 0)
        )
    # The reply is the engine's, byte for byte, and only its words are new where it refuses.
    path, body = "/v1/messages/count_tokens", dict(model="tiny", messages=turns)
    own, told = decode.post(path, body), router.post(path, json=body)
    assert (told.status_code, told.content) == (own.status_code, own.content)
    assert own.status_code == 200, own.text
    with pytest.raises(anthropic.NotFoundError) as caught:
        router.anthropic.messages.count_tokens(**{**asked, "model": "nobody"})
    assert caught.value.body["error"]["code"] == "model_not_found"
    with pytest.raises(anthropic.BadRequestError) as caught:
        router.anthropic.messages.count_tokens(model="tiny", messages=[{"role": "no", "content": "x"}])
    assert caught.value.body["type"] == "error" and caught.value.body["error"]["message"]


def test_the_clients_own_helpers_read_the_streams(router):
    system, text = conversation()
    with router.anthropic.messages.stream(
        model="tiny", system=system, max_tokens=6, messages=[{"role": "user", "content": text}]
    ) as stream:
        said = "".join(stream.text_stream)
        message = stream.get_final_message()
    assert message.content[0].text == said
    assert message.stop_reason == "max_tokens" and message.usage.output_tokens == 6
    assert message.usage.cache_read_input_tokens == 0

    with router.openai.responses.stream(
        model="tiny", instructions=system, input=text, max_output_tokens=6
    ) as stream:
        deltas = [e.delta for e in stream if e.type == "response.output_text.delta"]
        response = stream.get_final_response()
    assert "".join(deltas) == response.output_text
    assert response.usage.output_tokens == 6
    assert response.usage.input_tokens_details.cached_tokens == full_hit(response.usage.input_tokens)


def test_errors_raise_what_the_clients_have_for_them(router):
    message = dict(model="tiny", max_tokens=5, messages=[{"role": "user", "content": "a"}])
    response = dict(model="tiny", input="a", max_output_tokens=5)
    for wrong, of_anthropic, of_openai in [
        ({"model": "nobody"}, anthropic.NotFoundError, openai.NotFoundError),
        (
            {"extra_body": {"temperature": "hot"}},
            anthropic.BadRequestError,
            openai.BadRequestError,
        ),
    ]:
        with pytest.raises(of_anthropic) as caught:
            router.anthropic.messages.create(**{**message, **wrong})
        body = caught.value.body
        assert body["type"] == "error" and body["error"]["message"]
        assert caught.value.type in ("not_found_error", "invalid_request_error")
        assert caught.value.request_id and caught.value.request_id == body["request_id"]
        with pytest.raises(of_openai) as caught:
            router.openai.responses.create(**{**response, **wrong})
        assert caught.value.body["message"]
    with pytest.raises(anthropic.BadRequestError) as caught:
        router.anthropic.messages.create(
            **{**message, "messages": [{"role": "user", "content": "word " * 9000}]}
        )
    for kept in ({"background": True}, {"previous_response_id": "resp_1"}):
        with pytest.raises(openai.BadRequestError) as caught:
            router.openai.responses.create(**response, **kept)
        assert caught.value.param == next(iter(kept))
    with pytest.raises(openai.NotFoundError):
        router.openai.responses.retrieve("resp_1")
    for store in (True, False):
        answer = router.openai.responses.create(**response, store=store)
        assert answer.output_text is not None
        assert getattr(answer, "store", False) is False


@DIALECTS
def test_hand_off_fields_of_a_client_reach_no_engine(router, dialect):
    poison = {"kv_transfer_params": {"do_remote_prefill": True}}
    for fields in (poison, {"vllm_xargs": poison}, {"vllm_xargs": {**poison, "a": 1}}):
        answer = dialect(router).ask(*conversation(), **fields)
        assert answer.completion_tokens > 0


@DIALECTS
def test_a_client_that_leaves_frees_everything(router, prefill, decode, dialect):
    asked_tokens = 1500
    generated = decode.generated_tokens()
    path, body = dialect(router).body(*conversation(), max_tokens=asked_tokens)
    body = {**body, "stream": True, "ignore_eos": True}
    with httpx.stream("POST", f"{router.http}{path}", json=body, timeout=120) as reply:
        assert reply.status_code == 200
        lines = reply.iter_lines()
        assert next(lines).startswith("event: ")
        eventually(router.requests_in_flight, lambda count: count == 1, "the request")
    for engine in (prefill, decode):
        eventually(engine.running_requests, lambda running: running == 0, "running requests")
        eventually(engine.kv_usage, lambda usage: usage == 0, "KV in use")
    eventually(router.requests_in_flight, lambda count: count == 0, "requests in flight")
    assert decode.generated_tokens() - generated < asked_tokens
