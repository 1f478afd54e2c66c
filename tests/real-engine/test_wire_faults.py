"""Faults between router and engines: no hand-off is sent twice, and no reply is wrong.

Two proxies stand in front of each engine, so that each leg has a second worker to be
retried on. A request that meets a fault may fail, but it must say so.

Last by its name: what faults leave staged stays in the engines' caches until their leases
end, and other tests watch those caches grow.
"""

import concurrent.futures
import contextlib
import itertools

import pytest

from support import log_probabilities, outcome, prompts, proxy
from support.router import worker, worker_without_events
from support.waiting import eventually

MAX_TOKENS = 12
PROMPT_TOKENS = 100
ROLES = ("prefill", "decode")
EVERY_TIME = 99
TIMES = (1, EVERY_TIME)
# Faults are what is tried here, not how a worker comes to be left alone.
MODEL = ("breaker: { failures: 0 }", "retries: { budget_percent: 1000 }")
IMPATIENT = "timeouts: { prefill: 3s, first_token: 3s, reply: 3s, stream_idle: 3s }"


class Rig:
    """A router, the proxies between it and the engines, and what they saw."""

    def __init__(self, router, proxies, book):
        self.router, self.proxies, self.book = router, proxies, book
        self._well = []

    def expected(self, prompt):
        return log_probabilities.cold(self.router.complete, prompt, max_tokens=MAX_TOKENS)

    def ask(self, prompt, stream):
        return outcome.ask(self.router, prompt, stream, MAX_TOKENS)

    def ask_with_fault(self, role, kind, stream, times):
        """Asks once with the fault and once without; returns what the fault led to."""
        prompt = prompts.token_ids(PROMPT_TOKENS)
        expected = self.expected(prompt)
        with self.book.fault(role, kind, prompt, times) as fault:
            answer = self.ask(prompt, stream)
        assert fault.fired > 0, "the fault met no request"
        answer.check(expected)
        self.is_well(prompt, expected, stream)
        return answer

    def all_at_once(self, cases):
        with concurrent.futures.ThreadPoolExecutor(len(cases)) as pool:
            return list(pool.map(lambda case: self.ask_with_fault(*case), cases))

    def is_well(self, prompt, expected, stream):
        """Without a fault the answer is right."""
        answer = self.ask(prompt, stream)
        assert answer.error is None, answer
        answer.check(expected)
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
    answers = rig.all_at_once(cases)
    rig.settle()
    for (_, _, stream, times), answer in zip(cases, answers):
        if role == "prefill":
            # By the other worker, or by decode itself.
            assert answer.done, answer
        elif stream and kind in (proxy.CUT, proxy.END):
            # The client has a part of it already.
            assert answer.status == 200 and answer.error, answer
        else:
            assert answer.done == (times == 1), answer


@pytest.mark.parametrize("role", ROLES)
def test_connections_are_refused(rig, role):
    prompt = prompts.token_ids(PROMPT_TOKENS)
    expected = rig.expected(prompt)
    one, other = rig.proxies[role]
    for refusing in ([one], [other], [one, other]):
        with contextlib.ExitStack() as stack:
            for its in refusing:
                stack.enter_context(its.refusing())
            answers = [rig.ask(prompt, stream) for stream in FORMS.values()]
        for answer in answers:
            answer.check(expected)
            # A prompt can do without prefill workers, not without decode workers.
            assert answer.done == (role == "prefill" or len(refusing) == 1), answer
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
            with rig.router.leaving(outcome.body(prompt, stream, MAX_TOKENS)):
                eventually(lambda: fault.fired, bool, "the leg")
            rig.settle()
        rig.is_well(prompt, expected, stream)
    rig.settle()


def test_silence(start_rig):
    cases = list(itertools.product(ROLES, proxy.SILENCES, FORMS.values(), TIMES))
    with start_rig("silence", IMPATIENT) as rig:
        rig.all_at_once(cases)
        rig.settle()
