"""What a client got of a request in which something broke: whole, or a beginning and an error."""

import json

import httpx

from . import log_probabilities

PATH = "/v1/completions"


def body(prompt, stream, max_tokens):
    """A greedy completion that can be compared with a cold reference."""
    return {
        "model": "tiny",
        "prompt": prompt,
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": stream,
        **log_probabilities.COMPLETION,
    }


class Outcome:
    """What a client got: its answer so far, whether it was whole, and the error if one was told."""

    def __init__(self, reply, lines):
        self.status, self.text, self.error, self.done = reply.status_code, "", None, False
        self.request_id = reply.headers.get("x-request-id")
        self.steps = {0: []}
        if "text/event-stream" not in reply.headers["content-type"]:
            self._add(json.loads("".join(lines)))
            self.done = self.error is None
            return
        for line in lines:
            if line.startswith("data:"):
                # Nothing may follow the end, of whichever kind.
                assert not self.done and self.error is None, line
                data = line.removeprefix("data:").strip()
                self.done = data == "[DONE]"
                if not self.done:
                    self._add(json.loads(data))

    def _add(self, piece):
        self.error = piece.get("error")
        for choice in piece.get("choices", []):
            self.text += choice["text"]
            self.steps[0] += log_probabilities.steps(choice["logprobs"])

    def __repr__(self):
        return f"{self.status} {self.text!r} done={self.done} {self.error}"

    def check(self, expected):
        """Right and whole, or a beginning of what is right and an explicit error."""
        if self.error is None:
            assert (self.status, self.done, self.text) == (200, True, expected.text)
            log_probabilities.assert_exact(self, expected)
        else:
            assert not self.done and self.error["code"], self
            # A status is said once; what breaks off afterwards is an event.
            assert self.status >= 500 or self.error["code"] == "decode_lost", self
            assert expected.text.startswith(self.text), (self, expected.text)
            log_probabilities.assert_exact(self, expected, whole=False)


def ask(router, prompt, stream, max_tokens, at_first=None):
    """Asks, and calls `at_first` as soon as the reply has begun."""
    request = body(prompt, stream, max_tokens)
    with httpx.stream("POST", f"{router.http}{PATH}", json=request, timeout=180) as reply:
        if at_first:
            at_first()
        return Outcome(reply, list(reply.iter_lines()))
