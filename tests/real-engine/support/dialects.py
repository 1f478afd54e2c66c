"""A conversation as a response or as a message, and answers in one form."""

import dataclasses
import secrets

from . import log_probabilities


@dataclasses.dataclass
class Answer:
    request_id: str
    text: str
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    # See `log_probabilities`; empty in a dialect without log-probabilities.
    steps: dict


class Dialect:
    """Asks a router in the words of one API, through its official client."""

    # What asks for log-probabilities, where a reply can have them.
    log_probability_fields = {}

    def __init__(self, router):
        self._router = router

    def _request(self, system, said, model, max_tokens):
        turns = [{"role": "user", "content": said}] if isinstance(said, str) else said
        return dict(model=model, temperature=0, **self._words(system, turns, max_tokens))

    def body(self, system, said, model="tiny", max_tokens=8):
        """The endpoint's path and a request's body."""
        return self.path, self._request(system, said, model, max_tokens)

    def ask(self, system, said, model="tiny", max_tokens=8, stream=False, tools=None, **more):
        request_id = f"test-{secrets.token_hex(8)}"
        tool_choice = more.pop("tool_choice", None)
        request = self._request(system, said, model, max_tokens)
        if tools:
            request.update(tools=tools, tool_choice=tool_choice)
        reply = self._create(
            **request,
            stream=stream,
            extra_headers={"x-request-id": request_id},
            extra_body={**self.log_probability_fields, **more},
        )
        text, usage, steps = self._streamed(reply) if stream else self._whole(reply)
        return Answer(request_id, text, *self._figures(usage), steps={0: steps} if steps else {})


def alone():
    """What asks one engine to compute a prompt alone, with nothing of it cached."""
    return dict(model="tiny-aggregated", cache_salt=secrets.token_hex(8))


def assert_exact(answer, expected, stream):
    """Two answers come from equal KV: by the log-probabilities of whole responses. Messages have none,
    and streamed responses have none of tokens that end within a character, so that their text must do."""
    assert answer.text == expected.text
    if expected.steps and not stream:
        log_probabilities.assert_exact(answer, expected)


def _typed(content, kind):
    if isinstance(content, str):
        return content
    return [part if "type" in part else {"type": kind, **part} for part in content]


def _steps(response):
    parts = [part for item in response.output if item.type == "message" for part in item.content]
    return [step for part in parts for step in log_probabilities.steps(part.model_dump().get("logprobs"))]


class Responses(Dialect):
    path = "/v1/responses"
    log_probability_fields = log_probabilities.RESPONSE

    def _words(self, system, turns, max_tokens):
        kinds = {"user": "input_text", "assistant": "output_text"}
        items = [
            {
                "type": "message",
                "role": turn["role"],
                "content": _typed(turn["content"], kinds[turn["role"]]),
            }
            for turn in turns
        ]
        return dict(instructions=system, input=items, max_output_tokens=max_tokens)

    def _create(self, **request):
        return self._router.openai.responses.create(**request)

    def _whole(self, response):
        assert response.object == "response"
        assert response.status in ("completed", "incomplete")
        return response.output_text, response.usage, _steps(response)

    def _streamed(self, events):
        events = list(events)
        assert [event.sequence_number for event in events] == list(range(len(events)))
        assert events[0].type == "response.created"
        last = events[-1]
        # vLLM completes a response that has reached its limit, SGLang does not.
        assert last.type in ("response.completed", "response.incomplete")
        text = "".join(e.delta for e in events if e.type == "response.output_text.delta")
        assert text == last.response.output_text
        return text, last.response.usage, _steps(last.response)

    def _figures(self, usage):
        assert usage.total_tokens == usage.input_tokens + usage.output_tokens
        return usage.input_tokens, usage.input_tokens_details.cached_tokens, usage.output_tokens


class Messages(Dialect):
    path = "/v1/messages"

    def _words(self, system, turns, max_tokens):
        turns = [{**turn, "content": _typed(turn["content"], "text")} for turn in turns]
        return dict(system=system, messages=turns, max_tokens=max_tokens)

    def _create(self, temperature, **request):
        # A client of today may know no temperature; the engine does.
        extra_body = {"temperature": temperature, **request.pop("extra_body", {})}
        return self._router.anthropic.messages.create(**request, extra_body=extra_body)

    def _whole(self, message):
        assert (message.type, message.role) == ("message", "assistant")
        return "".join(block.text for block in message.content), message.usage, []

    def _streamed(self, events):
        events = list(events)
        names = [event.type for event in events]
        assert names[0] == "message_start"
        assert names[-2:] == ["message_delta", "message_stop"]
        deltas = (e.delta for e in events if e.type == "content_block_delta")
        return "".join(delta.text for delta in deltas), events[-2].usage, []

    def _figures(self, usage):
        read, written = usage.cache_read_input_tokens, usage.cache_creation_input_tokens or 0
        return usage.input_tokens + read + written, read, usage.output_tokens
