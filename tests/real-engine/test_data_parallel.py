"""One server with two data-parallel ranks, with a shim and without: each is a place of its own.

Its tests come late by name, since the server takes longer to start than they take.
"""

import contextlib
import os
import pathlib
import secrets
import subprocess

import httpx
import pytest

from support import log_probabilities, prompts, shim
from support import router as routers
from support.engine import BLOCK_SIZE, Engine, full_hit
from support.waiting import eventually, settled

RANKS = (0, 1)
BLOCKS_OF_A_RANK = 800
PROMPT_TOKENS, MAX_TOKENS = 330, 8
PROMPT_BLOCKS = PROMPT_TOKENS // BLOCK_SIZE

CONFIG = """\
listen:
  http: 127.0.0.1:0
  admin: 127.0.0.1:0
  fleet: 127.0.0.1:{fleet_port}
models:
  - name: tiny
    block_size: {block_size}
    tokenizer: {{ kind: huggingface, path: "{model_path}" }}
    flow: aggregated
    connector: none
    policy: {{ kind: kv_overlap }}
    canary: {{ interval: 24h }}
{workers}
"""


@pytest.fixture(scope="module")
def engine():
    script = pathlib.Path(__file__).with_name("engines.sh")
    port = os.environ["SPLITRAIL_RANKS_PORT"]
    try:
        subprocess.run([script, "ranks", port], check=True, timeout=600)
        yield Engine(int(port))
    finally:
        subprocess.run([script, "stop", port], check=True, timeout=60)


# The shim first: it asks once, and this server has not had a request yet. Until then
# vLLM's metrics do not tell the load of its ranks.
@pytest.fixture(scope="module", params=["shim", "direct"])
def router(request, engine):
    """A router that nobody told how many ranks there are."""
    logs = pathlib.Path(os.environ["SPLITRAIL_TEST_LOGS"]) / "ranks"
    fleet_port = shim.free_port()
    workers = {
        "shim": "    discovery: [ { kind: shim } ]",
        "direct": "    workers:\n" + routers.worker("w0", "both", engine),
    }
    yaml = CONFIG.format(
        fleet_port=fleet_port,
        block_size=BLOCK_SIZE,
        model_path=os.environ["SPLITRAIL_MODEL_PATH"],
        workers=workers[request.param],
    )
    with contextlib.ExitStack() as stack:
        binary = os.environ["SPLITRAIL_BIN"]
        router = stack.enter_context(routers.running(binary, yaml, logs / request.param))
        if request.param == "shim":
            stack.enter_context(shim.attached("w0", "both", engine, [fleet_port], logs))
        eventually(
            lambda: [known(worker) for worker in router.workers()],
            lambda seen: seen == [([(rank, True) for rank in RANKS], True, "ok")],
            "a worker with two ranks that can be chosen",
        )
        yield router


def known(worker):
    ranks = [(rank["rank"], rank["events_current"]) for rank in worker["ranks"]]
    return ranks, worker["takes_rank_header"], worker["parity"]


def indexed(router):
    """KV blocks in the index, by rank."""
    (worker,) = router.workers()
    return [rank["index_blocks"] for rank in worker["ranks"]]


def grown(before, after):
    return [now - then for then, now in zip(before, after, strict=True)]


def computed(engine):
    """Prompt tokens that each rank has computed, and found in its cache, by its own count."""
    sources = [engine.prompt_tokens_by_source(engine=str(rank)) for rank in RANKS]
    return [count for its in sources for count in (its["local_compute"], its["local_cache_hit"])]


def on(rank, compute, hit):
    """The same for one request that `rank` has served."""
    return [count if at == rank else 0 for at in RANKS for count in (compute, hit)]


def by_rank(decision):
    """What was known of each rank when it was decided, and the rank that was chosen."""
    overlaps = {its["rank"]: its["overlap_blocks"] for its in decision["candidates"]}
    (chosen,) = [its["rank"] for its in decision["candidates"] if its["chosen"]]
    return overlaps, chosen


def held_by(rank):
    return {at: PROMPT_BLOCKS if at == rank else 0 for at in RANKS}


def completion(prompt):
    more = {"max_tokens": MAX_TOKENS, "temperature": 0, "ignore_eos": True, **log_probabilities.COMPLETION}
    return {"model": "tiny", "prompt": prompt, **more}


def steps(reply):
    return {choice["index"]: log_probabilities.steps(choice["logprobs"]) for choice in reply["choices"]}


def test_the_blocks_of_all_ranks_are_counted_once(router):
    name = "splitrail_worker_kv_blocks"
    blocks = eventually(lambda: router.metrics().sum(name, state="total"), bool, "KV blocks")
    assert blocks == len(RANKS) * BLOCKS_OF_A_RANK
    (worker,) = router.workers()
    if worker["capabilities"]:
        told = worker["capabilities"]
        assert (told["ranks"], told["kv_blocks"]) == (len(RANKS), BLOCKS_OF_A_RANK)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_a_prompt_goes_back_to_the_rank_that_computed_it(router, engine, stream):
    prompt = prompts.token_ids(PROMPT_TOKENS)
    blocks, tokens = settled(lambda: indexed(router)), computed(engine)
    cold = router.complete(prompt, max_tokens=MAX_TOKENS, stream=stream)
    overlaps, rank = by_rank(router.decision(cold.request_id))
    assert overlaps == dict.fromkeys(RANKS, 0) and cold.cached_tokens == 0
    # It was computed there, and there alone is it indexed.
    eventually(
        lambda: grown(tokens, computed(engine)),
        lambda seen: seen == on(rank, PROMPT_TOKENS, 0),
        f"the prompt on rank {rank}",
    )
    eventually(
        lambda: grown(blocks, indexed(router)),
        lambda seen: seen == list(held_by(rank).values()),
        f"the prompt in the index of rank {rank}",
    )
    tokens = computed(engine)
    warm = router.complete(prompt, max_tokens=MAX_TOKENS, stream=stream)
    assert by_rank(router.decision(warm.request_id)) == (held_by(rank), rank)
    assert warm.cached_tokens == full_hit(PROMPT_TOKENS)
    hit = full_hit(PROMPT_TOKENS)
    eventually(
        lambda: grown(tokens, computed(engine)),
        lambda seen: seen == on(rank, PROMPT_TOKENS - hit, hit),
        f"a hit on rank {rank}",
    )
    reference = log_probabilities.cold(router.complete, prompt, model="tiny", max_tokens=MAX_TOKENS)
    log_probabilities.assert_exact(cold, reference)
    log_probabilities.assert_exact(warm, reference)


@pytest.mark.parametrize("rank", RANKS)
def test_what_a_rank_computed_for_others_is_found_there_whatever_a_client_says(
    router, engine, rank
):
    body, blocks = completion(prompts.token_ids(PROMPT_TOKENS)), settled(lambda: indexed(router))
    headers = {"x-data-parallel-rank": str(rank)}
    expected = engine.post("/v1/completions", body, headers=headers).json()
    assert expected["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    eventually(
        lambda: grown(blocks, indexed(router)),
        lambda seen: seen == list(held_by(rank).values()),
        f"the prompt in the index of rank {rank}",
    )
    explained = httpx.post(f"{router.admin}/admin/explain", json=body, timeout=30).json()
    (step,) = explained["explanation"]["prompts"][0]["steps"]
    assert by_rank(step) == (held_by(rank), rank)
    tokens, other = computed(engine), len(RANKS) - 1 - rank
    request_id = f"test-{secrets.token_hex(8)}"
    headers = {"x-data-parallel-rank": str(other), "x-request-id": request_id}
    asked = {**body, "data_parallel_rank": other}
    reply = router.post("/v1/completions", json=asked, headers=headers)
    assert reply.status_code == 200, reply.text
    assert by_rank(router.decision(request_id)) == (held_by(rank), rank)
    hit = full_hit(PROMPT_TOKENS)
    assert reply.json()["usage"]["prompt_tokens_details"]["cached_tokens"] == hit
    log_probabilities.assert_exact(steps(reply.json()), steps(expected))
    eventually(
        lambda: grown(tokens, computed(engine)),
        lambda seen: seen == on(rank, PROMPT_TOKENS - hit, hit),
        f"a hit on rank {rank}",
    )
