"""A LoRA adapter of a real server: its KV blocks are apart from the model's, for engine and router alike."""

import os
import pathlib
import subprocess

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
