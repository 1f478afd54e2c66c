"""Engines that are killed between any two steps of a request.

A killed engine takes half a minute to come back. So a run tries some of the steps, and all of them if
`SPLITRAIL_EVERY_KILL` is 1.
"""

import contextlib
import os

from . import log_probabilities, prompts
from .waiting import eventually

EVERY = os.environ.get("SPLITRAIL_EVERY_KILL") == "1"
# What a hand-off that nobody takes is held for, and some seconds more.
LEASE_S = 45


def chosen(cases, telling):
    """The cases of this run: all, or the telling ones."""
    return [case for case in cases if EVERY or case in telling]


class Kill:
    """A request during which an engine is killed.

    The request is under way when the context begins. The body brings it to the step, and calls
    `strike`. Afterwards the client has its answer: exact, or a beginning of it and an honest error.
    """

    def __init__(self, cluster, victim, prompt, stream=False, max_tokens=8, at_first=None):
        self.cluster, self.victim = cluster, victim
        ask = cluster.router.complete
        self.expected = log_probabilities.cold(ask, prompt, max_tokens=max_tokens)
        self._asked = lambda: cluster.outcome_later(prompt, stream, max_tokens, at_first)
        self.outcome = None

    def __enter__(self):
        self._asked = self._asked()
        return self

    def strike(self):
        self.cluster.pair.crash(self.victim)

    def __exit__(self, kind, *_):
        if kind is None:
            self.outcome = self._asked.result()
            print(f"the client got {self.outcome.status}, {self.outcome.error or 'whole'}")
            self.outcome.check(self.expected)


def strike_at(kill, fault, step, sends=None, takes=None, reached=None):
    """Kills the victim when a held request has reached its step, and lets the request go on.

    If KV moves in the step, the victim is killed meanwhile: the engine that `sends` is stopped, and the
    one that `takes` has got the request and waits. `reached` is called before that.
    """
    happened(fault, step)
    if reached:
        reached()
    with contextlib.ExitStack() as stopped:
        if sends:
            held = takes.blocks_in_use()
            stopped.enter_context(kill.cluster.pair.frozen(sends))
            fault.go.set()
            eventually(takes.blocks_in_use, lambda blocks: blocks > held, step)
        kill.strike()
    fault.go.set()


def recover(cluster, *engines):
    """Starts killed engines anew. Everything works as before."""
    cluster.pair.again(*engines)
    cluster.all_up()
    # Not counted: a spare engine may serve some of them.
    batch = [prompts.token_ids(300), prompts.token_ids(64)]
    references = cluster.references(batch)
    for answer, reference in zip(cluster.map(cluster.router.complete, batch), references):
        log_probabilities.assert_exact(answer, reference)
    cluster.nothing_is_held()
    assert cluster.book.sent_twice() == []


def happened(fault, what):
    eventually(lambda: fault.fired, bool, what)
