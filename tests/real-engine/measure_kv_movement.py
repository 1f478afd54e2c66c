"""Measures on real engines how long KV takes to move, and whether the policy predicts it.

Usage: measure_kv_movement.py push
       measure_kv_movement.py fetch [MODEL_FOLDER]

`push` asks a pair that pulls and a pair that pushes in turns. `fetch` compares a prefix that the prefill
engine holds, fetches or computes, and what the router has learned of these costs; the folder is that of a
larger model from `make_tiny_model.py`, which is made if it is not there. Both print a table for
`bench/results`. Run with the Python of the engines' environment and with `SPLITRAIL_BIN`; ports are
18301 and above, or `SPLITRAIL_MEASURE_PORT` and above. Nothing else should run meanwhile.
"""

import concurrent.futures
import contextlib
import http.client
import json
import os
import pathlib
import random
import statistics
import sys
import tempfile
import time

import httpx

from support import pairs, prompts
from support import router as routers
from support.engine import BLOCK_SIZE
from support.waiting import eventually

ENGINE_DIR = pathlib.Path(os.environ.get("SPLITRAIL_ENGINE_DIR", "~/.cache/splitrail/vllm-cpu"))
TINY_MODEL = ENGINE_DIR.expanduser() / "tiny-model"
# Layers, hidden and intermediate size: computing a token takes some hundred microseconds.
LARGER = 6, 512, 1024
LENGTHS = (64, 256, 512, 1024, 1900)
PREFIXES = (64, 128, 192, 256, 384, 512, 1024, 1888)
# What follows a prefix: computed in each case.
REST = 20
ROUNDS = 15
# How a fetch is forced, whatever it costs.
FORCED = "costs: { fetch_base_ms: 0, prefill_us_per_token: 1000000 }"


class Client:
    """Streams completions over a kept connection."""

    def __init__(self, router):
        self._connection = http.client.HTTPConnection(router.http.removeprefix("http://"))

    def ttft_ms(self, prompt):
        """The time from the request to the first event, and the request's id."""
        body = {"model": "tiny", "prompt": prompt, "max_tokens": 2, "temperature": 0}
        body = json.dumps({**body, "ignore_eos": True, "stream": True})
        begun = time.monotonic()
        self._connection.request(
            "POST", "/v1/completions", body, {"content-type": "application/json"}
        )
        reply = self._connection.getresponse()
        assert reply.status == 200, reply.read()
        while not reply.readline().startswith(b"data:"):
            pass
        took_ms = (time.monotonic() - begun) * 1e3
        reply.read()
        return took_ms, reply.headers["x-request-id"]


@contextlib.contextmanager
def router(name, pair, **options):
    workers = [
        routers.worker("p0", "prefill", pair.prefill),
        routers.worker("d0", "decode", pair.decode),
    ]
    model = os.environ.get("SPLITRAIL_ENGINE_MODEL", TINY_MODEL)
    yaml = routers.config(model, pair.decode, workers, **options)
    folder = pathlib.Path(os.environ["SPLITRAIL_TEST_LOGS"]) / name
    with routers.running(os.environ["SPLITRAIL_BIN"], yaml, folder) as its:

        def seen():
            known = [worker for worker in its.workers() if worker["model"] == "tiny"]
            return {(worker["up"], worker["parity"]) for worker in known}

        eventually(seen, lambda seen: seen == {(True, "ok")}, "both workers")
        yield its


def row(*cells):
    print("| " + " | ".join(cells) + " |", flush=True)


def header(*cells):
    row(*cells)
    row(*(["---"] + ["---:"] * (len(cells) - 1)))


def ms(value):
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}"


# ---------------------------------------------------------------- push against pull


def push_against_pull():
    with contextlib.ExitStack() as stack:
        pull = stack.enter_context(pairs.running("pd", "MEASURE_PULL"))
        push = stack.enter_context(pairs.running("push", "MEASURE_PUSH"))
        ways = {
            "pull": stack.enter_context(router("pull", pull, connector="nixl")),
            "push": stack.enter_context(router("push", push, connector="nixl_push")),
        }
        header("tokens", "at once", "pull, ms", "push, ms", "ratio")
        for at_once in (1, 4):
            clients = {way: [Client(its) for _ in range(at_once)] for way, its in ways.items()}
            for length in LENGTHS:
                times = {way: [] for way in ways}
                with concurrent.futures.ThreadPoolExecutor(at_once) as pool:
                    for turn in range(ROUNDS + 1):
                        for way in sorted(ways, reverse=turn % 2 == 0):
                            asked = [
                                pool.submit(client.ttft_ms, prompts.token_ids(length))
                                for client in clients[way]
                            ]
                            took = [future.result()[0] for future in asked]
                            # The first round opens connections.
                            times[way] += took if turn else []
                pulled, pushed = (statistics.median(times[way]) for way in ("pull", "push"))
                ratio = f"{pushed / pulled:.2f}"
                row(str(length), str(at_once), ms(pulled), ms(pushed), ratio)


# ---------------------------------------------------------------- hit, fetch, compute


def overlap(its, prompt, worker):
    """Leading blocks of a prompt that the router knows a worker to hold."""
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 2}
    params = {"endpoint": "/v1/completions"}
    reply = httpx.post(f"{its.admin}/admin/explain", params=params, json=body, timeout=30).json()

    def candidates(value):
        if isinstance(value, dict):
            if value.get("worker") == worker and "overlap_blocks" in value:
                yield value["overlap_blocks"]
            value = list(value.values())
        if isinstance(value, list):
            for inner in value:
                yield from candidates(inner)

    return max(candidates(reply), default=0)


def hold(pair, engine, prefix):
    body = {"model": "tiny", "prompt": prefix, "max_tokens": 1}
    assert engine.post("/v1/completions", body).status_code == 200


def learned(its):
    """The prefill worker's costs as the router has learned them: of computing and fetching."""
    (worker,) = [worker for worker in its.workers() if worker["id"] == "p0"]
    view = worker["costs"]
    costs = view["costs"]
    fetch_ms_per_token = costs["kv_bytes_per_token"] / view["fetch_gb_per_second"] / 1e6

    def compute(tokens):
        """What computing a prefix and the rest takes more than computing the rest behind it."""
        pairs_ns = costs["prefill_ns_per_token_pair"] * tokens * tokens / 2
        return costs["prefill_us_per_token"] * tokens / 1e3 + pairs_ns / 1e6

    return compute, lambda tokens: costs["fetch_base_ms"] + fetch_ms_per_token * tokens, view


def crossing(points):
    """Where a difference, given at several lengths, becomes positive for good; by interpolation."""
    for (at, low), (then, high) in reversed(list(zip(points, points[1:]))):
        if low < 0 <= high:
            return at + (then - at) * -low / (high - low)
    return None


def fetch_against_compute():
    with contextlib.ExitStack() as stack:
        pair = stack.enter_context(pairs.running("peers", "MEASURE_PEER"))
        fetching = ("peer_fetch: two_step", "peer_fetch_min_tokens: 1", "queue: none")
        options = {"policy": "predicted_ttft"}

        def start(name, *more):
            return stack.enter_context(router(name, pair, more=more, **options))

        compute = start("compute", "queue: none")
        fetch = start("fetch", *fetching, FORCED)
        policy = start("policy", *fetching)
        clients = {its: Client(its) for its in (compute, fetch, policy)}
        asks = {"hit": compute, "fetch": fetch, "compute": compute, "policy": policy}
        times = {(way, tokens): [] for way in asks for tokens in PREFIXES}
        fetched = {tokens: 0 for tokens in PREFIXES}
        predicted_ms = {tokens: [] for tokens in PREFIXES}
        choose = random.Random(7)
        for turn in range(ROUNDS + 1):
            cases = list(times)
            choose.shuffle(cases)
            for way, tokens in cases:
                its, prefix = asks[way], prompts.token_ids(tokens)
                prompt = prefix + prompts.token_ids(REST)
                holders = {"d0": pair.decode} | ({"p0": pair.prefill} if way == "hit" else {})
                for worker, engine in holders.items():
                    hold(pair, engine, prefix)
                    eventually(
                        lambda: overlap(its, prompt, worker),
                        lambda blocks: blocks >= tokens // BLOCK_SIZE,
                        f"the blocks of {worker}",
                    )
                took_ms, request_id = clients[its].ttft_ms(prompt)
                record = its.decision(request_id)
                outcome = (record.get("fetch") or {}).get("outcome")
                assert way != "fetch" or outcome == "fetched", record
                # The first round opens connections, and teaches.
                if turn:
                    times[way, tokens].append(took_ms)
                    if way == "policy":
                        fetched[tokens] += outcome == "fetched"
        compute_ms, fetch_ms, costs = learned(policy)
        header(
            "prefix, tokens", "hit, ms", "fetch, ms", "compute, ms", "policy, ms", "of these fetched",
            "fetch - hit, ms", "predicted, ms", "compute - hit, ms", "predicted, ms",
        )  # fmt: skip
        median = {case: statistics.median(took) for case, took in times.items()}
        for tokens in PREFIXES:
            hit, fetch_took, computed, chosen = (median[way, tokens] for way in asks)
            row(
                str(tokens), ms(hit), ms(fetch_took), ms(computed), ms(chosen),
                f"{fetched[tokens]}/{ROUNDS}", ms(fetch_took - hit), ms(fetch_ms(tokens)),
                ms(computed - hit), ms(compute_ms(tokens)),
            )  # fmt: skip
        print()
        # The policy predicts means; medians tell how much of those is noise.
        for name, of in (("means", statistics.mean), ("medians", statistics.median)):
            lost = [(n, of(times["compute", n]) - of(times["fetch", n])) for n in PREFIXES]
            print(f"crossover by {name}: {crossing(lost)} tokens")
        grid = range(8, 2049, 8)
        predicted = crossing([(n, compute_ms(n) - fetch_ms(n)) for n in grid])
        print(f"crossover predicted: {predicted} tokens\nlearned {json.dumps(costs)}")


def main(what, folder=None):
    first = int(os.environ.get("SPLITRAIL_MEASURE_PORT", 18301))
    for at, name in enumerate(("PULL", "PUSH", "PEER")):
        ports = f"{first + 2 * at} {first + 2 * at + 1}"
        os.environ[f"SPLITRAIL_MEASURE_{name}_PORTS"] = ports
    os.environ.setdefault("SPLITRAIL_TEST_LOGS", tempfile.mkdtemp(prefix="splitrail-measure."))
    if folder:
        os.environ["SPLITRAIL_ENGINE_MODEL"] = folder
        if not pathlib.Path(folder, "model.safetensors").exists():
            import make_tiny_model

            make_tiny_model.main(folder, *LARGER)
    print(f"load average {os.getloadavg()}", flush=True)
    {"push": push_against_pull, "fetch": fetch_against_compute}[what]()
    print(f"load average {os.getloadavg()}")


if __name__ == "__main__":
    main(*sys.argv[1:])
