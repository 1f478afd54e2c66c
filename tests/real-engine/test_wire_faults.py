"""Whatever breaks between router and engines, no hand-off is sent twice and no answer is wrong.

Two proxies stand in front of each engine, so that each leg has a second worker to be
retried on. A request that meets a fault may fail, but it must say so.

Last by its name: what faults leave staged stays in the engines' caches until their leases
end, and other tests watch those caches grow.
"""

import concurrent.futures
import contextlib
import http.client
import itertools
import json

import httpx
import pytest

from support import prompts, proxy, witness
from support.router import worker, worker_without_events
from support.waiting import eventually

MAX_TOKENS = 12
PROMPT_TOKENS = 100
PATH = "/v1/completions"
ROLES = ("prefill", "decode")
EVERY_TIME = 99
TIMES = (1, EVERY_TIME)
# Faults are what is tried here, not how a worker comes to be left alone.
MODEL = ("breaker: { failures: 0 }", "retries: { budget_percent: 1000 }")
IMPATIENT = "timeouts: { prefill: 3s, first_token: 3s, reply: 3s, stream_idle: 3s }"


class Outcome:
    """What a client got: its answer so far, whether it was whole, and the error if one was told."""

    def __init__(self, reply, lines):
        self.status, self.text, self.error, self.done = reply.status_code, "", None, False
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
            self.steps[0] += witness.steps(choice["logprobs"])

    def __repr__(self):
        return f"{self.status} {self.text!r} done={self.done} {self.error}"

    def check(self, expected):
        """Right and whole, or a beginning of what is right and an explicit error."""
        if self.error is None:
            assert (self.status, self.done, self.text) == (200, True, expected.text)
            witness.assert_exact(self, expected)
        else:
            assert not self.done and self.error["code"], self
            # A status is said once; what breaks off afterwards is an event.
            assert self.status >= 500 or self.error["code"] == "decode_lost", self
            assert expected.text.startswith(self.text), (self, expected.text)
            witness.assert_exact(self, expected, whole=False)


class Rig:
    """A router, the proxies between it and the engines, and what they saw."""

    def __init__(self, router, proxies, book):
        self.router, self.proxies, self.book = router, proxies, book
        self._well = []

    def expected(self, prompt):
        return witness.cold(self.router.complete, prompt, max_tokens=MAX_TOKENS)

    def ask(self, prompt, stream):
        url, body = f"{self.router.http}{PATH}", self._body(prompt, stream)
        with httpx.stream("POST", url, json=body, timeout=120) as reply:
            return Outcome(reply, list(reply.iter_lines()))

    def ask_and_leave(self, prompt, stream, once):
        """Asks, and hangs up when `once` says so."""
        connection = http.client.HTTPConnection(self.router.http.removeprefix("http://"))
        with contextlib.closing(connection):
            body = json.dumps(self._body(prompt, stream))
            connection.request("POST", PATH, body, {"content-type": "application/json"})
            eventually(once, bool, "time to leave")

    def _body(self, prompt, stream):
        return {
            "model": "tiny",
            "prompt": prompt,
            "max_tokens": MAX_TOKENS,
            "temperature": 0,
            "ignore_eos": True,
            "stream": stream,
            **witness.COMPLETION,
        }

    def ask_with_fault(self, role, kind, stream, times):
        """Asks once with the fault and once without; returns what the fault led to."""
        prompt = prompts.token_ids(PROMPT_TOKENS)
        expected = self.expected(prompt)
        with self.book.fault(role, kind, prompt, times) as fault:
            outcome = self.ask(prompt, stream)
        assert fault.fired > 0, "the fault met no request"
        outcome.check(expected)
        self.is_well(prompt, expected, stream)
        return outcome

    def all_at_once(self, cases):
        with concurrent.futures.ThreadPoolExecutor(len(cases)) as pool:
            return list(pool.map(lambda case: self.ask_with_fault(*case), cases))

    def is_well(self, prompt, expected, stream):
        """Without a fault the answer is right."""
        outcome = self.ask(prompt, stream)
        assert outcome.error is None, outcome
        outcome.check(expected)
        self._well.append(prompt)

    def settle(self):
        """Nothing stays booked, and every hand-off went where it should, once."""
        eventually(self._booked, lambda booked: not any(booked), "bookings")
        eventually(self.router.requests_in_flight, lambda count: count == 0, "in flight")
        assert self.book.mishaps == []
        # Those that went well took a hand-off each.
        assert len(self.book.received) >= len(self._well) > 0
        assert self.book.sent_twice() == []
        assert self.book.made_up() == []

    def _booked(self):
        keys = ("requests", "prefill_tokens", "active_tokens")
        return [worker[key] for worker in self.router.workers() for key in keys]

    def _ups(self):
        return [worker["up"] for worker in self.router.workers()]

    def all_up(self):
        eventually(self._ups, all, "workers up")


@pytest.fixture(scope="module")
def start_rig(start_router, prefill, decode):
    @contextlib.contextmanager
    def start(name, *more):
        book = proxy.Book()
        engines = {"prefill": prefill, "decode": decode}
        proxies = {role: [proxy.Proxy(engines[role], role, book) for _ in "01"] for role in ROLES}
        workers = []
        for role in ROLES:
            first, second = proxies[role]
            workers.append(worker(f"{role[0]}0", role, first))
            # An engine's events are one worker's.
            workers.append(worker_without_events(f"{role[0]}1", role, second))
        with contextlib.ExitStack() as stack:
            for its in proxies["prefill"] + proxies["decode"]:
                stack.callback(its.close)
            router = stack.enter_context(start_router(name, workers, more=(*MODEL, *more)))
            rig = Rig(router, proxies, book)
            rig.all_up()
            yield rig

    return start


@pytest.fixture(scope="module")
def rig(start_rig):
    with start_rig("faults") as rig:
        yield rig


FORMS = {"whole": False, "streamed": True}


@pytest.mark.parametrize("kind", proxy.BREAKS)
@pytest.mark.parametrize("role", ROLES)
def test_a_leg_breaks(rig, role, kind):
    cases = [(role, kind, stream, times) for stream in FORMS.values() for times in TIMES]
    outcomes = rig.all_at_once(cases)
    rig.settle()
    for (_, _, stream, times), outcome in zip(cases, outcomes):
        if role == "prefill":
            # By the other worker, or by decode itself.
            assert outcome.done, outcome
        elif stream and kind in (proxy.CUT, proxy.END):
            # The client has a part of it already.
            assert outcome.status == 200 and outcome.error, outcome
        else:
            assert outcome.done == (times == 1), outcome


@pytest.mark.parametrize("role", ROLES)
def test_connections_are_refused(rig, role):
    prompt = prompts.token_ids(PROMPT_TOKENS)
    expected = rig.expected(prompt)
    one, other = rig.proxies[role]
    for refusing in ([one], [other], [one, other]):
        with contextlib.ExitStack() as stack:
            for its in refusing:
                stack.enter_context(its.refusing())
            outcomes = [rig.ask(prompt, stream) for stream in FORMS.values()]
        for outcome in outcomes:
            outcome.check(expected)
            # A prompt can do without prefill workers, not without decode workers.
            assert outcome.done == (role == "prefill" or len(refusing) == 1), outcome
        rig.all_up()
        rig.is_well(prompt, expected, stream=False)
    rig.settle()


@pytest.mark.parametrize("kind", proxy.SILENCES)
@pytest.mark.parametrize("role", ROLES)
def test_the_client_leaves_a_silent_leg(rig, role, kind):
    for stream in FORMS.values():
        prompt = prompts.token_ids(PROMPT_TOKENS)
        expected = rig.expected(prompt)
        with rig.book.fault(role, kind, prompt, EVERY_TIME) as fault:
            rig.ask_and_leave(prompt, stream, once=lambda: fault.fired > 0)
            rig.settle()
        rig.is_well(prompt, expected, stream)
    rig.settle()


def test_silence(start_rig):
    cases = list(itertools.product(ROLES, proxy.SILENCES, FORMS.values(), TIMES))
    with start_rig("silence", IMPATIENT) as rig:
        rig.all_at_once(cases)
        rig.settle()
