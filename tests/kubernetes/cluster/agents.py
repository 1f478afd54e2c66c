"""Sessions of agents: each turn's prompt begins with all of the turn before."""

import collections
import json
import statistics
import time
from concurrent.futures import ThreadPoolExecutor

import httpx

SESSIONS = 18
# All sessions begin with the same instructions.
INSTRUCTIONS_TOKENS, FIRST_TOKENS, TURN_TOKENS = 128, 384, 96


class Turn:
    """One reply: which workers served it, and what of the prompt was cached."""

    def __init__(self, phase, session, headers, usage, ttft_s):
        self.phase, self.session, self.ttft_s = phase, session, ttft_s
        route = headers["x-splitrail-route"]
        entries = dict(entry.split("=", 1) for entry in route.split("; ") if "=" in entry)
        self.workers = {role: entries.get(role) for role in ("prefill", "decode")}
        self.prompt_tokens = usage["prompt_tokens"]
        self.cached_tokens = usage["prompt_tokens_details"]["cached_tokens"]

    def __repr__(self):
        return f"{self.phase}: {self.workers}, {self.cached_tokens} of {self.prompt_tokens}"

    def revision(self, role):
        """The revision of a worker, with which its name begins; `None` without such a leg."""
        worker = self.workers[role]
        return worker and worker.split("-")[0]


class Sessions:
    def __init__(self, router, model):
        self._url, self._model = f"{router.http}/v1/completions", model
        instructions = list(range(10, 10 + INSTRUCTIONS_TOKENS))
        self._prompts = [instructions + self._tokens(n, FIRST_TOKENS) for n in range(SESSIONS)]
        self._client = httpx.Client(timeout=120)
        self.turns = []

    @staticmethod
    def _tokens(seed, count):
        return [3 + (seed * 7919 + place * 31) % 30_000 for place in range(count)]

    def turn(self, phase, concurrent):
        """One more turn of each session, so many at a time."""
        with ThreadPoolExecutor(concurrent) as pool:
            self.turns += pool.map(lambda session: self._ask(phase, session), range(SESSIONS))
        for session, prompt in enumerate(self._prompts):
            prompt += self._tokens(session + len(prompt), TURN_TOKENS)

    def _ask(self, phase, session):
        body = {
            "model": self._model,
            "prompt": self._prompts[session],
            "max_tokens": 4,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        begun = time.monotonic()
        first_s, usage = None, None
        with self._client.stream("POST", self._url, json=body) as reply:
            assert reply.status_code == 200, reply.read()
            for line in reply.iter_lines():
                if not line.startswith("data: ") or line == "data: [DONE]":
                    continue
                first_s = first_s or time.monotonic() - begun
                usage = json.loads(line[6:]).get("usage") or usage
        return Turn(phase, session, reply.headers, usage, first_s)

    def phases(self):
        """The turns of each phase, in the order of phases."""
        by_phase = collections.defaultdict(list)
        for turn in self.turns:
            by_phase[turn.phase].append(turn)
        return by_phase

    def recomputed(self):
        """How often the engines have computed again what a session had in its last turn."""
        times = collections.Counter({session: 0 for session in range(SESSIONS)})
        last = {}
        for turn in self.turns:
            before = last.get(turn.session)
            if before and turn.cached_tokens < before.prompt_tokens // 2:
                times[turn.session] += 1
            last[turn.session] = turn
        return times

    def table(self):
        lines = [f"{'phase':<20} {'cached':>7} {'TTFT mean':>10} {'on new':>7}"]
        for phase, turns in self.phases().items():
            cached = sum(turn.cached_tokens for turn in turns) / sum(turn.prompt_tokens for turn in turns)
            ttft_ms = statistics.mean(turn.ttft_s for turn in turns) * 1e3
            new = sum(turn.revision("decode") == "new" for turn in turns)
            lines.append(f"{phase:<20} {cached:>7.1%} {ttft_ms:>7.0f} ms {new:>4}/{len(turns)}")
        return "\n".join(lines)
