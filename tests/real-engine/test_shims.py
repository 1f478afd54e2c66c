"""Two routers, and a shim before each engine: the gate holds by the engines' own counters.

Last by its name: in the end the decode engine is replaced by another process.
"""

import contextlib
import os
import pathlib
import subprocess

import httpx
import pytest

from support import prompts, shim
from support import router as routers
from support.engine import BLOCK_SIZE, full_hit
from support.waiting import eventually, settled
from support.log_probabilities import assert_exact, cold

MAX_TOKENS = 12


@pytest.fixture(scope="module")
def fleet(prefill, decode):
    logs = pathlib.Path(os.environ["SPLITRAIL_TEST_LOGS"]) / "shims"
    binary = os.environ["SPLITRAIL_BIN"]
    ports = [shim.free_port(), shim.free_port()]
    with contextlib.ExitStack() as stack:
        both = [
            stack.enter_context(
                routers.running(binary, shim.router_config(port, decode), logs / f"r{at}")
            )
            for at, port in enumerate(ports)
        ]
        for id, role, engine in [("p0", "prefill", prefill), ("d0", "decode", decode)]:
            stack.enter_context(shim.attached(id, role, engine, ports, logs))
        for router in both:
            eventually(
                lambda router=router: agreeing(router),
                lambda seen: seen == {"p0", "d0"},
                "workers that are attached and agree",
            )
        yield both


def workers(router):
    return {w["id"]: w for w in router.workers() if w["model"] == "tiny"}


def agreeing(router):
    seen = workers(router).values()
    return {w["id"] for w in seen if w["parity"] == "ok" and w["kv_routing"]}


def index(router, worker):
    reply = httpx.get(f"{router.admin}/admin/workers/{worker}/index", timeout=30)
    reply.raise_for_status()
    return reply.json()["ranks"]


def digests(fleet):
    return [index(router, "d0")[0]["digest"] for router in fleet]


def grown(before, after):
    return {source: after[source] - before[source] for source in after}


def alone(router, prompt):
    return cold(router.complete, prompt, max_tokens=MAX_TOKENS)


def test_what_the_engines_are_is_known(fleet):
    for router in fleet:
        for worker in workers(router).values():
            known = worker["capabilities"]
            assert known["engine"] == "vllm" and known["engine_version"].startswith("0.32")
            assert known["block_size"] == BLOCK_SIZE and known["ranks"] == 1
            assert known["supports_cache_hit_threshold"] is False and known["gates"] is True
            assert known["reports_cached_tokens"] is True
            assert known["publishes_kv_events"] and known["replays_kv_events"]
            assert worker["sources"] == ["shim"]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_a_miss_costs_decode_no_prefill_and_a_hit_costs_prefill_nothing(
    fleet, prefill, decode, stream
):
    first, second = fleet
    prompt = prompts.token_ids(300)
    expected = alone(first, prompt)
    before = prefill.prompt_tokens_by_source(), decode.prompt_tokens_by_source()
    held = digests(fleet)
    missed = first.complete(prompt, max_tokens=MAX_TOKENS, stream=stream)
    # The cache may be full: what comes in is seen by what is there, not by how much.
    eventually(
        lambda: settled(lambda: digests(fleet)),
        lambda seen: seen[0] == seen[1] and seen != held,
        "the prompt in both indexes",
    )
    after = prefill.prompt_tokens_by_source(), decode.prompt_tokens_by_source()
    record = first.decision(missed.request_id)
    assert (record["gate"], record["decode_try"]) == ("shim", "rejected")
    assert_exact(missed, expected)
    assert missed.cached_tokens == 0
    # All of it was computed on prefill, none of it on decode: it came over as a whole.
    assert grown(before[0], after[0])["local_compute"] == 300
    on_decode = grown(before[1], after[1])
    assert on_decode["external_kv_transfer"] == 300, on_decode
    assert on_decode["local_compute"] == on_decode["local_cache_hit"] == 0
    # The other router knows as much.
    before = after
    warm = second.complete(prompt, max_tokens=MAX_TOKENS, stream=stream)
    after = prefill.prompt_tokens_by_source(), decode.prompt_tokens_by_source()
    record = second.decision(warm.request_id)
    assert (record["gate"], record["decode_try"]) == ("shim", "served")
    assert_exact(warm, expected)
    assert warm.cached_tokens == full_hit(300)
    assert grown(before[0], after[0]) == dict.fromkeys(before[0], 0), "prefill was not asked"
    assert grown(before[1], after[1])["local_cache_hit"] == full_hit(300)


def test_both_routers_hold_the_same(fleet):
    for worker in ["p0", "d0"]:
        eventually(
            lambda worker=worker: [index(router, worker) for router in fleet],
            lambda seen: seen[0] == seen[1] and seen[0][0]["names"] > 0,
            f"one picture of {worker}",
        )


def test_another_engine_in_the_place_of_one_is_noticed(fleet, decode):
    old = [index(router, "d0")[0]["digest"] for router in fleet]
    script = pathlib.Path(__file__).with_name("engines.sh")
    for command in ("crash", "again"):
        subprocess.run([script, command, str(decode.port)], check=True, timeout=300)
    prompt = prompts.token_ids(200)
    for router in fleet:
        eventually(
            lambda router=router: agreeing(router),
            lambda seen: seen == {"p0", "d0"},
            "the new engine is attached and agrees",
        )
    held = eventually(
        lambda: [index(router, "d0") for router in fleet],
        lambda seen: seen[0] == seen[1],
        "one picture of the new engine",
    )
    # What it has now is what it was asked since: the canaries of two routers.
    assert held[0][0]["digest"] not in old and 0 < held[0][0]["names"] < 100, held
    expected = alone(fleet[0], prompt)
    for router in fleet:
        answer = router.complete(prompt, max_tokens=MAX_TOKENS)
        assert_exact(answer, expected)
