"""A LoRA adapter of a real server: its KV blocks are apart from the model's, and from those of other weights
under the same name, for engine and router alike."""

import os
import pathlib
import subprocess
import sys

import httpx
import pytest

from support import prompts
from support import router as routers
from support.engine import BLOCK_SIZE, Engine, full_hit
from support.waiting import eventually
from support.log_probabilities import TOLERANCE, assert_exact, cold, difference

PROMPT_TOKENS = 200
BLOCKS = PROMPT_TOKENS // BLOCK_SIZE


@pytest.fixture(scope="module")
def engine():
    script = pathlib.Path(__file__).with_name("engines.sh")
    port = os.environ["SPLITRAIL_ADAPTER_PORT"]
    subprocess.run([script, "adapter", port], check=True, timeout=600)
    yield Engine(int(port))
    subprocess.run([script, "stop", port], check=True, timeout=60)


@pytest.fixture(scope="module")
def adapter_router(engine):
    folder = pathlib.Path(os.environ["SPLITRAIL_TEST_LOGS"]) / "adapter"
    workers = [routers.worker("l0", "both", engine)]
    yaml = routers.adapter_config(os.environ["SPLITRAIL_MODEL_PATH"], "tiny-lora", workers)
    with routers.running(os.environ["SPLITRAIL_BIN"], yaml, folder) as router:
        yield router


def test_the_canary_finds_the_blocks_of_model_and_adapter(adapter_router):
    def parity():
        (worker,) = adapter_router.workers()
        return worker["parity"], worker["parity_cause"], worker["kv_routing"]

    eventually(parity, lambda seen: seen == ("ok", None, True), "the worker agrees on both")


def ask(router, model, prompt):
    """A completion, with the blocks that the router expected to find and the cached tokens."""
    answer = router.complete(prompt, model=model)
    overlap = router.decision(answer.request_id)["overlap_blocks"]
    return answer, (overlap, answer.cached_tokens)


def test_model_and_adapter_share_no_blocks_and_each_finds_its_own(adapter_router):
    prompt = prompts.token_ids(PROMPT_TOKENS)
    with adapter_router.indexing("l0", BLOCKS):
        plain, found = ask(adapter_router, "tiny", prompt)
    assert found == (0, 0)
    with adapter_router.indexing("l0", BLOCKS):
        adapted, found = ask(adapter_router, "tiny-lora", prompt)
    assert found == (0, 0), "the adapter finds none of the model's blocks"
    assert difference(adapted.steps[0], plain.steps[0]) > TOLERANCE, "the engine ran the adapter"
    for model, first in (("tiny-lora", adapted), ("tiny", plain)):
        expected = cold(adapter_router.complete, prompt, model=model)
        assert_exact(first, expected)
        again, found = ask(adapter_router, model, prompt)
        assert found == (BLOCKS, full_hit(PROMPT_TOKENS))
        assert_exact(again, expected)


def load(engine, folder, **more):
    reply = engine.post("/v1/load_lora_adapter", {"lora_name": "tiny-lora", "lora_path": str(folder), **more})
    assert reply.status_code == 200, reply.text


def unload(engine):
    reply = engine.post("/v1/unload_lora_adapter", {"lora_name": "tiny-lora"})
    assert reply.status_code == 200, reply.text


def promised(router, model, prompt):
    """Blocks of a prompt that the router expects to find."""
    told = router.explain("/v1/completions", model=model, prompt=prompt, max_tokens=1)
    return told["explanation"]["prompts"][0]["steps"][0]["candidates"][0]["overlap_blocks"]


def root_of(engine):
    """From where the engine has loaded the adapter."""
    models = httpx.get(f"{engine.url}/v1/models", timeout=30).json()["data"]
    return next(model["root"] for model in models if model["id"] == "tiny-lora")


@pytest.fixture(scope="module")
def other_weights(tmp_path_factory):
    folder = tmp_path_factory.mktemp("adapter") / "other"
    script = pathlib.Path(__file__).with_name("make_tiny_adapter.py")
    subprocess.run([sys.executable, script, folder, "2"], check=True, timeout=120)
    return folder


def test_other_weights_under_the_same_name_find_nothing_of_those_before(adapter_router, engine, other_weights):
    prompt = prompts.token_ids(PROMPT_TOKENS)
    before = root_of(engine)
    with adapter_router.indexing("l0", BLOCKS):
        first, _ = ask(adapter_router, "tiny-lora", prompt)
    assert promised(adapter_router, "tiny-lora", prompt) == BLOCKS
    unload(engine)
    load(engine, other_weights)
    eventually(lambda: promised(adapter_router, "tiny-lora", prompt), lambda blocks: blocks == 0, "the load is known")
    with adapter_router.indexing("l0", BLOCKS):
        second, found = ask(adapter_router, "tiny-lora", prompt)
    assert found == (0, 0)
    assert difference(second.steps[0], first.steps[0]) > TOLERANCE, "the engine ran the other weights"
    expected = cold(adapter_router.complete, prompt, model="tiny-lora")
    assert_exact(second, expected)
    again, found = ask(adapter_router, "tiny-lora", prompt)
    assert found == (BLOCKS, full_hit(PROMPT_TOKENS))
    assert_exact(again, expected)
    # Back in place: the engine hashes by the path, and finds what it has kept of it; the router promises
    # nothing of it, and tells the engine's figure.
    load(engine, before, load_inplace=True)
    eventually(lambda: promised(adapter_router, "tiny-lora", prompt), lambda blocks: blocks == 0, "the load is known")
    back, found = ask(adapter_router, "tiny-lora", prompt)
    assert found == (0, full_hit(PROMPT_TOKENS))
    assert_exact(back, first)


def test_an_adapter_that_is_unloaded_is_not_found_until_it_is_loaded(adapter_router, engine):
    def adapters():
        (worker,) = adapter_router.workers()
        return worker["adapters"]

    eventually(adapters, lambda names: names == ["tiny-lora"], "it is loaded")
    root = root_of(engine)
    unload(engine)
    eventually(adapters, lambda names: names == [], "it is unloaded")
    body = {"model": "tiny-lora", "prompt": prompts.token_ids(40), "max_tokens": 1}
    reply = adapter_router.post("/v1/completions", json=body)
    assert (reply.status_code, reply.json()["error"]["code"]) == (404, "engine_lacks_model")
    load(engine, root)
    assert adapter_router.post("/v1/completions", json=body).status_code == 200


def test_a_reset_of_the_prefix_cache_ends_the_blocks_of_model_and_adapter(adapter_router, engine):
    prompt = prompts.token_ids(PROMPT_TOKENS)
    for model in ("tiny", "tiny-lora"):
        with adapter_router.indexing("l0", BLOCKS):
            ask(adapter_router, model, prompt)
    assert engine.post("/reset_prefix_cache", {}).json() == {"success": True}
    # The engine tells of it with its next step.
    ask(adapter_router, "tiny", prompts.token_ids(BLOCK_SIZE + 8))
    for model in ("tiny", "tiny-lora"):
        eventually(lambda: promised(adapter_router, model, prompt), lambda blocks: blocks == 0, "the reset is known")
        _, found = ask(adapter_router, model, prompt)
        assert found == (0, 0)
