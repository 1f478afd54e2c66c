"""SGLang: one server alone (`engine: sglang`), and prefill and decode servers in pairs (`connector: sglang`),
joined by Mooncake over TCP.

The server alone is the witness of the pairs: with the same KV, its log-probabilities are theirs.
"""

import concurrent.futures

import pytest

from support import check_connect, dialects, log_probabilities, outcome, prompts, sglang
from support.engine import BLOCK_SIZE, full_hit
from support.waiting import eventually, settled

# The server alone, and pairs.
MODELS = pytest.mark.parametrize("model", ["tiny-aggregated", "tiny"], ids=["alone", "pair"])
STREAM = pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])


@pytest.fixture(scope="module")
def servers():
    with sglang.running() as servers:
        yield servers


@pytest.fixture(scope="module")
def router(servers):
    with sglang.router(servers, servers.decode, "sglang") as router:
        yield router


@pytest.fixture
def later():
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        yield pool.submit


def worker(router, id):
    (found,) = [known for known in router.workers() if known["id"] == id]
    return found


def computes(servers, model):
    """The engines that compute prompts of a model."""
    return [servers.alone] if model == "tiny-aggregated" else servers.prefills


def cached_by_engines(engines):
    return settled(lambda: sum(engine.cached_tokens() for engine in engines))


def test_what_engines_say_of_themselves_is_known(router, servers):
    for id, engine in [("p0", servers.prefills[0]), ("p1", servers.prefills[1])]:
        seen = worker(router, id)
        assert seen["kv_events"] == engine.kv_events
        assert (seen["kv_block_size"], seen["kv_routing"]) == (BLOCK_SIZE, True)
    # It has no prefix cache, and publishes nothing.
    seen = worker(router, "d0")
    assert (seen["kv_events"], seen["kv_routing"]) == (None, False)
    (alone,) = [known for known in router.workers() if known["model"] == "tiny-aggregated"]
    assert (alone["kv_events"], alone["kv_routing"]) == (servers.alone.kv_events, True)
    for seen in router.workers():

        def load(id=seen["id"]):
            return [worker(router, id)[of] for of in ("engine_running", "engine_kv_used_ratio")]

        eventually(load, lambda known: None not in known, f"the load of {seen['id']}")


@MODELS
@STREAM
def test_cached_tokens_are_the_engines_own_and_answers_are_exact(router, servers, model, stream):
    engines = computes(servers, model)
    prompt = prompts.token_ids(300)
    partly = prompt[:160] + prompts.token_ids(140)
    for asked, cached in [(prompt, 0), (prompt, full_hit(300)), (partly, 160)]:
        reference = log_probabilities.cold(router.complete, asked)
        before = cached_by_engines(engines)
        answer = router.complete(asked, model=model, stream=stream)
        assert answer.cached_tokens == cached
        assert cached_by_engines(engines) - before == cached
        log_probabilities.assert_exact(answer, reference)


@MODELS
def test_chats_samples_and_batches_are_exact(router, model):
    messages = prompts.chat()
    reference = log_probabilities.cold(router.chat, messages)
    log_probabilities.assert_exact(router.chat(messages, model=model), reference)
    batch = [prompts.token_ids(length) for length in (33, 64, 65, 500)]
    for prompt in batch:
        reference = log_probabilities.cold(router.complete, prompt)
        answer = router.complete(prompt, model=model, n=2)
        for index in (0, 1):
            log_probabilities.assert_exact({0: answer.steps[index]}, {0: reference.steps[0]})


@MODELS
def test_a_salt_has_a_cache_of_its_own(router, model):
    prompt = prompts.token_ids(200)
    for salt in ("tenant-a", "tenant-b"):
        salted = {"extra_body": {"cache_salt": salt}}
        cold = router.complete(prompt, model=model, **salted)
        warm = router.complete(prompt, model=model, **salted)
        assert (cold.cached_tokens, warm.cached_tokens) == (0, full_hit(200)), salt
    assert router.complete(prompt, model=model).cached_tokens == 0, "no salt is not any salt"


@pytest.mark.parametrize("dialect", [dialects.Responses, dialects.Messages], ids=["responses", "messages"])
@STREAM
def test_pairs_serve_both_dialects(router, dialect, stream):
    asker = dialect(router)
    if stream:
        # SGLang streams responses without log-probabilities.
        asker.log_probability_fields = {}
    system, said = f"You are terse. {prompts.text()[:16]}", prompts.text()
    expected = asker.ask(system, said, model="tiny-aggregated")
    for _ in ("cold", "warm"):
        answer = asker.ask(system, said, stream=stream)
        assert answer.prompt_tokens == expected.prompt_tokens
        dialects.assert_exact(answer, expected, stream)
        decision = router.decision(answer.request_id)
        assert decision["prefill_worker"] and decision["decode_worker"] == "d0"
    assert answer.cached_tokens == full_hit(answer.prompt_tokens)


def test_responses_have_salts_and_messages_refuse_them(router):
    system, said = "You are terse.", prompts.text()
    asker = dialects.Responses(router)
    for salt in ("a", "b"):
        cold, warm = (asker.ask(system, said, cache_salt=salt) for _ in range(2))
        assert (cold.cached_tokens, warm.cached_tokens) == (0, full_hit(warm.prompt_tokens))
    path, body = dialects.Messages(router).body(system, said)
    refused = router.post(path, json={**body, "cache_salt": "a"})
    assert refused.status_code == 400
    assert "cache_salt" in refused.json()["error"]["message"]


@MODELS
def test_token_ids_are_not_offered(router, model):
    body = {"model": model, "token_ids": [5, 6, 7], "sampling_params": {"max_tokens": 1}}
    refused = router.post("/inference/v1/generate", json=body)
    assert (refused.status_code, refused.json()["error"]["code"]) == (404, "not_offered")


def test_a_prompt_returns_to_the_blocks_that_events_have_told_of(router):
    def indexed():
        return router.index_blocks("p0") + router.index_blocks("p1")

    for prompt in [prompts.token_ids(320) for _ in range(6)]:
        blocks = len(prompt) // BLOCK_SIZE
        before = settled(indexed)
        first = router.decision(router.complete(prompt).request_id)
        eventually(indexed, lambda now: now - before >= blocks, "the index")
        again = router.complete(prompt + prompts.token_ids(40))
        decision = router.decision(again.request_id)
        assert decision["prefill_worker"] == first["prefill_worker"]
        assert decision["overlap_blocks"] == blocks
        assert again.cached_tokens == blocks * BLOCK_SIZE


@MODELS
@STREAM
def test_a_client_that_leaves_frees_the_engines(router, servers, model, stream):
    body = outcome.body(prompts.token_ids(300), stream, 1500) | {"model": model}
    decode = servers.alone if model == "tiny-aggregated" else servers.decode
    before = int(decode.metrics().sum("sglang:generation_tokens_total"))
    with router.leaving(body):
        eventually(decode.requests, bool, "the request runs")
    servers.are_idle()
    eventually(router.requests_in_flight, lambda count: count == 0, "the request")
    generated = int(decode.metrics().sum("sglang:generation_tokens_total")) - before
    assert generated < 1500, "it ended early"


def test_a_leg_alone_ends_with_its_client(router, servers):
    # Alone, each engine would wait for five minutes.
    pairs = [([servers.decode], servers.prefills), (servers.prefills, [servers.decode])]
    for stopped, waiting in pairs:

        def requests(waiting=waiting):
            return sum(engine.requests() for engine in waiting)

        with servers.frozen(*stopped):
            with router.leaving(outcome.body(prompts.token_ids(300), False, 8)):
                eventually(requests, bool, "one leg waits")
            eventually(requests, lambda count: count == 0, "its end")
        servers.are_idle()
        sglang.all_up(router)


def test_a_prefill_engine_that_is_killed_costs_no_answer(router, servers, later):
    prompt = prompts.token_ids(300)
    reference = log_probabilities.cold(router.complete, prompt)
    with servers.frozen(servers.decode):
        asked = later(router.complete, prompt)
        pending = eventually(
            lambda: [engine for engine in servers.prefills if engine.requests()], bool, "a leg is pending"
        )
        servers.crash(*pending)
    log_probabilities.assert_exact(asked.result(), reference)
    servers.again(*pending)
    sglang.all_up(router)
    log_probabilities.assert_exact(router.complete(prompt), reference)


def test_a_decode_engine_may_have_a_cache_of_its_own(servers):
    decode = servers.caching_decode
    with sglang.router(servers, decode, "sglang-caching") as router:
        seen = worker(router, "d0")
        assert (seen["kv_events"], seen["kv_routing"]) == (decode.kv_events, True)
        prompt = prompts.token_ids(300)
        reference = log_probabilities.cold(router.complete, prompt)
        blocks = 300 // BLOCK_SIZE
        before = settled(lambda: router.index_blocks("d0"))
        log_probabilities.assert_exact(router.complete(prompt), reference)
        eventually(lambda: router.index_blocks("d0"), lambda now: now - before >= blocks, "its index")
        for engine in servers.prefills:
            engine.forget()
        before = decode.cached_tokens()
        log_probabilities.assert_exact(router.complete(prompt), reference)
        eventually(decode.cached_tokens, lambda now: now - before == full_hit(300), "its own hit")


def test_the_check_finds_nothing_wrong(servers, tmp_path):
    path = tmp_path / "splitrail.yaml"
    path.write_text(sglang.config(servers, servers.decode))
    code, result = check_connect.check(path)
    findings = [
        finding
        for model in result["models"]
        for of in [model, *model["workers"]]
        for finding in of["findings"]
    ]
    assert (code, findings) == (0, [])
    for model in result["models"]:
        for one in model["workers"]:
            assert one["facts"]["version"] == "0.5.23"
