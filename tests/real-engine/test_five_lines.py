"""Two addresses are enough: the router asks vLLM for the rest."""

import os
import pathlib

import pytest

from support import check_connect, log_probabilities, plain_http, prompts
from support import router as routers
from support.engine import BLOCK_SIZE, full_hit
from support.waiting import eventually


@pytest.fixture(scope="module")
def router(prefill, decode):
    yaml = routers.five_lines(os.environ["SPLITRAIL_MODEL_PATH"], prefill, decode)
    folder = pathlib.Path(os.environ["SPLITRAIL_TEST_LOGS"]) / "five-lines"
    with routers.running(os.environ["SPLITRAIL_BIN"], yaml, folder) as router:
        eventually(router.is_ready, bool, "the router is ready")
        yield router


def by_role(router):
    return {worker["role"]: worker for worker in router.workers()}


def test_what_is_left_out_is_asked_of_the_engines(router, prefill, decode):
    workers = by_role(router)
    assert set(workers) == {"prefill", "decode"}
    for role, engine in (("prefill", prefill), ("decode", decode)):
        worker = workers[role]
        assert (worker["id"], worker["url"]) == (f"{role[0]}0", engine.url)
        assert worker["kv_events"] == engine.kv_events
        assert worker["events_current"] and worker["index_synced"]
        assert worker["context_tokens"] > 0
        assert worker["supports_cache_hit_threshold"] is False
    config = plain_http.get(f"{router.admin}/admin/config", timeout=30).json()
    (model,) = config["models"]
    assert (model["flow"], model["connector"]) == ("decode_first", "nixl")
    assert model["queue"] != "none"


def test_the_check_of_the_same_file_is_green_and_shows_what_it_asked(tmp_path, prefill, decode):
    path = tmp_path / "splitrail.yaml"
    path.write_text(routers.five_lines(os.environ["SPLITRAIL_MODEL_PATH"], prefill, decode))
    code, result = check_connect.check(path)
    (model,) = result["models"]
    found = [worker["findings"] for worker in model["workers"]] + [model["findings"]]
    assert (code, found) == (0, [[], [], []])
    for worker, engine in zip(model["workers"], (prefill, decode)):
        facts = worker["facts"]
        assert (facts["kv_events"], facts["kv_replay"]) == (engine.kv_events, engine.kv_replay)
        assert facts["kv_events_arrive"] and facts["kv_events_replayed"]
        assert (facts["connector"], facts["block_size"]) == ("nixl", BLOCK_SIZE)
    received = model["workers"][1]["facts"]["hand_offs"]
    assert received == [{"from": model["workers"][0]["id"], "works": True}]


def test_a_repeated_prompt_is_found_by_index_and_engine_alike(router, decode):
    prompt = prompts.token_ids(320)
    # By this threshold the decode worker computes all of it alone.
    alone = {"cache_hit_threshold": 0}
    reference = log_probabilities.cold(router.complete, prompt, model="tiny", extra_body=alone)
    first = router.complete(prompt)
    assert first.cached_tokens == 0
    blocks = 320 // BLOCK_SIZE

    def again():
        answer = router.complete(prompt)
        return answer, router.decision(answer.request_id)

    # The decode worker has the prompt from the hand-off, and serves it alone once its events tell.
    warm, record = eventually(
        again, lambda found: found[1]["decode_try"] == "served", "the decode worker serves alone"
    )
    assert record["gate"] == "router"
    assert warm.cached_tokens == full_hit(320)
    log_probabilities.assert_exact(first, reference)
    log_probabilities.assert_exact(warm, reference)
    assert router.index_blocks("d0") >= blocks
