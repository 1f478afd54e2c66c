"""Pairs of real engines with other connectors, for as long as a module's tests take."""

import concurrent.futures
import contextlib
import dataclasses
import functools
import os
import pathlib
import subprocess
import time

import pytest

from . import log_probabilities, outcome, prompts, proxy
from . import router as routers
from .engine import BLOCK_SIZE, Engine, full_hit
from .waiting import PATIENCE_S, eventually, settled

SCRIPT = pathlib.Path(__file__).parents[1] / "engines.sh"
# More than the script waits for one engine to start.
START_TIMEOUT_S = 200 + int(os.environ.get("SPLITRAIL_ENGINE_TIMEOUT_S", 400))
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

    @contextlib.contextmanager
    def frozen(self, *engines):
        """Stops all processes of engines for as long as the body runs."""
        self._run("freeze", *engines)
        try:
            yield
        finally:
            self._run("thaw", *engines)

    def _run(self, command, *engines):
        ports = [str(engine.port) for engine in engines]
        subprocess.run([SCRIPT, command, *ports], check=True, timeout=START_TIMEOUT_S)


def _ports(name):
    if both := os.environ.get(f"SPLITRAIL_{name}_PORTS"):
        return both.split()
    return [os.environ[f"SPLITRAIL_{name}_{role}_PORT"] for role in ("PREFILL", "DECODE")]


@contextlib.contextmanager
def running(kind, name):
    """A pair of a kind of `engines.sh`, on the ports that `run.sh` has for `name`."""
    ports = _ports(name)
    started = subprocess.run(
        [SCRIPT, kind, *ports], stderr=subprocess.PIPE, text=True, timeout=START_TIMEOUT_S
    )
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
    # The same figures in the router's ledger, of the prefill and the decode legs.
    told_prefill: dict
    told_decode: dict

    @property
    def cached_tokens(self):
        """What the clients were told."""
        return [answer.cached_tokens for answer in self.answers]


def difference(after, before):
    """What counts by source have grown by."""
    return {source: after[source] - before[source] for source in after}


class Cluster:
    """A router before engines, with a proxy before each, and what passed the proxies."""

    def __init__(self, router, book, pair):
        self.router, self.book, self.pair = router, book, pair
        self._pool = concurrent.futures.ThreadPoolExecutor(len(prompts.LENGTHS))

    def map(self, do, batch):
        """Does something with each of a batch, all at once."""
        return list(self._pool.map(do, batch))

    def references(self, batch, **kwargs):
        """What one engine answers that computes each prompt whole."""
        cold = functools.partial(log_probabilities.cold, self.router.complete, **kwargs)
        return self.map(cold, batch)

    def ask_all(self, batch, references=None, **kwargs):
        """Asks all prompts at once; the answers must be exact."""
        references = references or self.references(batch)
        before = settled(self._counts)
        answers = self.map(lambda prompt: self.router.complete(prompt, **kwargs), batch)
        for answer, reference in zip(answers, references, strict=True):
            log_probabilities.assert_exact(answer, reference)
        tokens = sum(answer.usage.prompt_tokens for answer in answers)
        return Asked(answers, *self._grown(before, tokens))

    def hold(self, prefixes, engine=None, worker="d0"):
        """Lets the decode engine, or another one, compute prefixes, of which the router learns from its
        events.
        """
        blocks = sum(len(prefix) // BLOCK_SIZE for prefix in prefixes)
        with self.router.indexing(worker, blocks):
            for prefix in prefixes:
                body = {"model": "tiny", "prompt": prefix, "max_tokens": 1}
                holder = engine or self.pair.decode
                assert holder.post("/v1/completions", body).status_code == 200

    def prefill_holds(self, prompt, reference):
        """The prefill engine has all of a prompt in its cache, and what it has is right for everyone."""
        body = outcome.body(prompt, stream=False, max_tokens=8)
        hit = self.pair.prefill.post("/v1/completions", body).json()
        assert hit["usage"]["prompt_tokens_details"]["cached_tokens"] == full_hit(len(prompt))
        log_probabilities.assert_exact({0: log_probabilities.steps(hit["choices"][0]["logprobs"])}, reference)

    def ask_later(self, prompt, **kwargs):
        """A future of the answer."""
        return self._pool.submit(self.router.complete, prompt, **kwargs)

    def outcome_later(self, prompt, stream=False, max_tokens=8, at_first=None):
        """A future of what a client gets, which may be an error."""
        asked = outcome.ask, self.router, prompt, stream, max_tokens, at_first
        return self._pool.submit(*asked)

    def prefill_counts(self):
        """What the ledger says of prefill legs, and the prefill engine's own tokens by source."""
        counted = settled(self.pair.prefill.prompt_tokens_by_source)
        return self.router.prompt_tokens_by_source("prefill"), counted

    def _counts(self):
        by_engines = [engine.prompt_tokens_by_source() for engine in self.pair.engines]
        by_router = [self.router.prompt_tokens_by_source(leg) for leg in ("prefill", "decode")]
        return by_engines + by_router

    def _grown(self, before, prompt_tokens):
        """What engines and router have counted since `before`, once all have counted so many tokens."""
        return eventually(
            lambda: list(map(difference, self._counts(), before)),
            lambda counts: all(sum(its.values()) >= prompt_tokens for its in counts),
            "the token counts",
        )

    def nothing_is_held(self, *engines, patience_s=PATIENCE_S):
        """No request uses a KV block any more, on these engines or on both.

        What decode keeps pinned for a next turn is no request's; pins of one conversation share blocks.
        """
        since = time.monotonic()
        for engine in engines or self.pair.engines:
            what = f"KV in use on {engine.port}, and pinned there"
            read = functools.partial(self._in_use_and_pinned, engine)
            eventually(read, lambda blocks: blocks[0] <= blocks[1], what, patience_s)
            print(f"nothing is held on {engine.port} after {time.monotonic() - since:.1f} s")

    def _in_use_and_pinned(self, engine):
        pinned = "splitrail_read_back_pinned_blocks"
        of_decode = self.router.metrics().sum(pinned, model="tiny", worker="d0")
        return engine.blocks_in_use(), int(of_decode) if engine is self.pair.decode else 0

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
        """All engines are up and agree with the router on blocks."""

        def seen():
            workers = [known for known in self.router.workers() if known["model"] == "tiny"]
            return {(known["up"], known["parity"]) for known in workers}

        eventually(seen, lambda seen: seen == {(True, "ok")}, "all workers")


# Engines break here on purpose; they are to be asked again at once.
PATIENT = ("breaker: { failures: 0 }", "retries: { budget_percent: 1000 }")


@contextlib.contextmanager
def cluster(
    pair, connector, alone, bootstrap=None, name=None, second=None, spare=None, more=(), **options
):
    """A router for `connector` before the pair.

    `alone` is an engine for cold references, `second` a second prefill engine, `spare` a second decode
    engine. `more` are further lines of the model, and `options` those of `router.config`.
    """
    book = proxy.Book(takers=("prefill", "decode"))
    with contextlib.ExitStack() as stack:
        workers = []
        engines = [("p0", "prefill", pair.prefill), ("d0", "decode", pair.decode)]
        engines += [("p1", "prefill", second)] if second else []
        engines += [("d1", "decode", spare)] if spare else []
        for id, role, engine in engines:
            its = proxy.Proxy(engine, role, book)
            stack.callback(its.close)
            of_it = {"bootstrap": bootstrap} if role == "prefill" else {}
            workers.append(routers.worker(id, role, its, **of_it))
        yaml = routers.config(
            os.environ["SPLITRAIL_MODEL_PATH"],
            alone,
            workers,
            connector=connector,
            more=(*PATIENT, *more),
            **options,
        )
        folder = pathlib.Path(os.environ["SPLITRAIL_TEST_LOGS"]) / (name or connector)
        binary = os.environ["SPLITRAIL_BIN"]
        router = stack.enter_context(routers.running(binary, yaml, folder))
        its = Cluster(router, book, pair)
        its.all_up()
        yield its
