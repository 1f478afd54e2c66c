"""Pairs of real engines with other connectors, for as long as a module's tests take."""

import concurrent.futures
import contextlib
import dataclasses
import os
import pathlib
import subprocess

import pytest

from . import proxy, witness
from . import router as routers
from .engine import Engine
from .waiting import eventually, settled

SCRIPT = pathlib.Path(__file__).parents[1] / "engines.sh"
# What the script says when this machine cannot have the engines.
CANNOT_BE_HAD = 77


class Pair:
    """A prefill and a decode engine that can be killed."""

    def __init__(self, prefill_port, decode_port):
        self.prefill, self.decode = Engine(prefill_port), Engine(decode_port)
        self.engines = (self.prefill, self.decode)

    def crash(self, *engines):
        """Kills engines as `kill -9` does. Returns when they are gone."""
        self._run("crash", *engines)

    def again(self, *engines):
        """Starts killed engines anew. Returns when they are up."""
        self._run("again", *engines)

    def _run(self, command, *engines):
        ports = [str(engine.port) for engine in engines]
        subprocess.run([SCRIPT, command, *ports], check=True, timeout=600)


@contextlib.contextmanager
def running(kind, name):
    """A pair of a kind of `engines.sh`, on the ports that `run.sh` has for `name`."""
    ports = [os.environ[f"SPLITRAIL_{name}_{role}_PORT"] for role in ("PREFILL", "DECODE")]
    started = subprocess.run([SCRIPT, kind, *ports], stderr=subprocess.PIPE, text=True, timeout=600)
    try:
        if started.returncode == CANNOT_BE_HAD:
            pytest.skip(f"SKIPPED: {kind}: {started.stderr.strip()}")
        assert started.returncode == 0, started.stderr
        yield Pair(*map(int, ports))
    finally:
        subprocess.run([SCRIPT, "stop", *ports], check=True, timeout=60)


@dataclasses.dataclass
class Asked:
    """Answers, and the prompt tokens that both engines have counted for them, by source."""

    answers: list
    on_prefill: dict
    on_decode: dict

    @property
    def cached_tokens(self):
        """What the clients were told."""
        return [answer.cached_tokens for answer in self.answers]


class Cluster:
    """A router before a pair, with a proxy before each engine, and what passed the proxies."""

    def __init__(self, router, book, pair):
        self.router, self.book, self.pair = router, book, pair
        self._pool = concurrent.futures.ThreadPoolExecutor(16)

    def ask_all(self, batch, **kwargs):
        """Asks all prompts at once; the answers must be exact."""
        references = [witness.cold(self.router.complete, prompt) for prompt in batch]
        before = settled(self._counts)
        answers = list(self._pool.map(lambda p: self.router.complete(p, **kwargs), batch))
        for answer, reference in zip(answers, references):
            witness.assert_exact(answer, reference)
        tokens = sum(answer.usage.prompt_tokens for answer in answers)
        return Asked(answers, *self._grown(before, tokens))

    def ask_later(self, prompt, **kwargs):
        """A future of the answer."""
        return self._pool.submit(self.router.complete, prompt, **kwargs)

    def _counts(self):
        return [engine.prompt_tokens_by_source() for engine in self.pair.engines]

    def _grown(self, before, prompt_tokens):
        """What both engines have counted since `before`, once they have counted so many tokens."""

        def since():
            return [
                {source: count - then[source] for source, count in its.items()}
                for then, its in zip(before, self._counts())
            ]

        return eventually(
            since,
            lambda counts: all(sum(its.values()) >= prompt_tokens for its in counts),
            "the engines' token counts",
        )

    def nothing_is_held(self, *engines):
        """No request uses a KV block any more, on these engines or on both."""
        for engine in engines or self.pair.engines:
            eventually(engine.kv_usage, lambda usage: usage == 0, f"KV in use on {engine.port}")

    def hand_offs(self, outcome):
        """Hand-offs that no decode worker used, by what became of them."""
        name = "splitrail_unused_hand_offs_total"
        return self.router.metrics().sum(name, model="tiny", outcome=outcome)

    def is_known_to_be_down(self, id):
        """The router knows that an engine is gone."""

        def up():
            workers = self.router.workers()
            return [known["up"] for known in workers if known["id"] == id]

        eventually(up, lambda seen: seen == [False], f"{id} is down")

    def all_up(self):
        """Both engines are up and agree with the router on blocks."""

        def seen():
            workers = [known for known in self.router.workers() if known["model"] == "tiny"]
            return [(known["up"], known["parity"]) for known in workers]

        eventually(seen, lambda seen: seen == [(True, "ok")] * 2, "both workers")


@contextlib.contextmanager
def cluster(pair, connector, alone, bootstrap=None):
    """A router for `connector` before the pair. `alone` is an engine for cold references."""
    book = proxy.Book()
    with contextlib.ExitStack() as stack:
        workers = []
        for role, engine in zip(("prefill", "decode"), pair.engines):
            its = proxy.Proxy(engine, role, book)
            stack.callback(its.close)
            more = {"bootstrap": bootstrap} if role == "prefill" else {}
            workers.append(routers.worker(f"{role[0]}0", role, its, **more))
        yaml = routers.config(
            os.environ["SPLITRAIL_MODEL_PATH"],
            alone,
            workers,
            connector=connector,
            # Engines break here on purpose; they are to be asked again at once.
            more=("breaker: { failures: 0 }", "retries: { budget_percent: 1000 }"),
        )
        folder = pathlib.Path(os.environ["SPLITRAIL_TEST_LOGS"]) / connector
        binary = os.environ["SPLITRAIL_BIN"]
        router = stack.enter_context(routers.running(binary, yaml, folder))
        its = Cluster(router, book, pair)
        its.all_up()
        yield its
