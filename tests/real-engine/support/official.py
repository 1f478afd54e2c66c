"""The official clients over TLS, as their users make them, with a record of what they exchange."""

import dataclasses
import time

import anthropic
import openai


@dataclasses.dataclass
class Exchange:
    """One request of a client and the head of its reply. Times are seconds of a steady clock."""

    sent_at: float
    received_at: float
    status: int
    headers: dict

    @property
    def told_s(self):
        """The seconds for which the client was told to wait."""
        return int(self.headers["retry-after-ms"]) / 1000


class Client:
    """One client with one key. Its retries are the client's own, unless `options` say otherwise."""

    def __init__(self, url, key, trust, **options):
        self.exchanges = []
        self._sent_at = None
        hooks = {"request": [self._sent], "response": [self._received]}
        http_client = self.library.DefaultHttpxClient(verify=trust, event_hooks=hooks)
        self.client = self._make(url, api_key=key, http_client=http_client, **options)

    def _sent(self, _):
        self._sent_at = time.monotonic()

    def _received(self, response):
        self.exchanges.append(
            Exchange(
                self._sent_at, time.monotonic(), response.status_code, dict(response.headers)
            )
        )

    @property
    def statuses(self):
        return [exchange.status for exchange in self.exchanges]

    def ask(self, model="sim", max_tokens=4, stream=False):
        """A greedy chat of exactly `max_tokens` tokens: the reply, or the stream."""
        return self._ask(
            model=model,
            max_tokens=max_tokens,
            messages=[{"role": "user", "content": "hello"}],
            stream=stream,
            extra_body={"temperature": 0, "ignore_eos": True},
        )


class OpenAI(Client):
    library, name = openai, "openai"

    def _make(self, url, **options):
        return openai.OpenAI(base_url=f"{url}/v1", **options)

    def _ask(self, **request):
        return self.client.chat.completions.create(**request)

    @staticmethod
    def tokens(reply):
        return reply.usage.completion_tokens

    @staticmethod
    def kind_and_code(error):
        return error.type, error.code


class Anthropic(Client):
    library, name = anthropic, "anthropic"

    def _make(self, url, **options):
        return anthropic.Anthropic(base_url=url, **options)

    def _ask(self, **request):
        return self.client.messages.create(**request)

    @staticmethod
    def tokens(reply):
        return reply.usage.output_tokens

    @staticmethod
    def kind_and_code(error):
        assert error.body["type"] == "error"
        return error.body["error"]["type"], None


BOTH = (OpenAI, Anthropic)
