"""Tenants on a real pair: no hits across their caches, full hits within, on every endpoint.

The figures of the replies are compared with what the engines themselves count.
"""

import os
import pathlib
import secrets

import pytest

from support import router as routers
from support import tenants
from support.engine import BLOCK_SIZE, full_hit
from support.keys import Keys, salt_of_tenant

ENDPOINTS = pytest.mark.parametrize("endpoint", tenants.ENDPOINTS)
SALT_SECRET = secrets.token_hex(16)
BLOCKS_MIN = 8


@pytest.fixture(scope="module", params=["prefill_first", "decode_first"])
def cluster(request, start_router, prefill, decode):
    flow = request.param
    name = f"tenants-{flow}"
    folder = pathlib.Path(os.environ["SPLITRAIL_TEST_LOGS"]) / name
    key_file = Keys(folder)
    keys = {tenant: key_file.new(tenant)[1] for tenant in tenants.NAMES}
    salt_file = folder / "salt.key"
    salt_file.write_text(f"{SALT_SECRET}\n")
    top = (
        f'auth: [ {{ kind: keys, file: "{key_file.path}" }} ]\n'
        f'cache_salt_key: {{ kind: file, path: "{salt_file}" }}\n{tenants.TENANTS}'
    )
    workers = [routers.worker("p0", "prefill", prefill), routers.worker("d0", "decode", decode)]
    with start_router(name, workers, flow=flow, top=top) as router:
        cluster = tenants.Cluster(router, flow, keys, {"p0": prefill, "d0": decode})
        cluster.await_own_prompts()
        yield cluster


def assert_warm(cluster, asked):
    """The engine that computed the prompt had all of it but the last token, and says so."""
    tokens = asked.prompt_tokens
    assert asked.cached_tokens == full_hit(tokens)
    assert asked.record["overlap_blocks"] == tokens // BLOCK_SIZE
    if cluster.flow == "prefill_first":
        assert asked.hits["p0"] == asked.cached_tokens
    else:
        assert asked.record["decode_try"] == "served"
        assert asked.hits == {"d0": asked.cached_tokens}


@ENDPOINTS
def test_a_prompt_is_cached_for_its_tenant_and_its_cache_group_only(cluster, endpoint):
    conversation = tenants.Conversation()
    expected_tokens = conversation.tokens(endpoint, cluster.engines["p0"])
    assert expected_tokens >= BLOCKS_MIN * BLOCK_SIZE
    cold = cluster.ask_cold("acme", endpoint, conversation)
    assert cold.prompt_tokens == expected_tokens
    assert_warm(cluster, cluster.ask("acme", endpoint, conversation))
    cluster.ask_cold("beta", endpoint, conversation)
    cluster.ask_cold("red", endpoint, conversation)
    assert_warm(cluster, cluster.ask("blue", endpoint, conversation))


@ENDPOINTS
def test_a_client_s_salt_narrows_its_tenant_s_cache_and_opens_no_other(cluster, endpoint):
    conversation = tenants.Conversation()
    cluster.ask_cold("acme", endpoint, conversation)
    cluster.ask_cold("acme", endpoint, conversation, salt="mine")
    assert_warm(cluster, cluster.ask("acme", endpoint, conversation, salt="mine"))
    # Neither the salt that the other client sent nor the one that engines get for its tenant helps.
    for salt in ("mine", salt_of_tenant(SALT_SECRET, "acme")):
        cluster.ask_cold("beta", endpoint, conversation, salt=salt)
    assert_warm(cluster, cluster.ask("acme", endpoint, conversation))


def test_the_derived_salt_finds_the_tenant_s_blocks_past_the_router_only(cluster, prefill):
    """Proves that the salt which the other tenant imitates is the one that engines get."""
    conversation = tenants.Conversation()
    cold = cluster.ask_cold("acme", "completions", conversation)
    salt = salt_of_tenant(SALT_SECRET, "acme")
    for given, cached in ((salt, full_hit(cold.prompt_tokens)), (None, 0)):
        body = {"model": "tiny", "prompt": conversation.plain, "max_tokens": 1, "cache_salt": given}
        usage = prefill.post("/v1/completions", body).json()["usage"]
        assert usage["prompt_tokens_details"]["cached_tokens"] == cached
    cluster.ask_cold("beta", "completions", conversation, salt=salt)
