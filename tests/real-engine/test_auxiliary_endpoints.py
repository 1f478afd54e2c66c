"""Auxiliary endpoints: embeddings by a server that embeds, tokens and texts by the pair."""

import os
import pathlib
import subprocess

import openai
import pytest

from support import router as routers
from support.engine import Engine

INPUTS = ["hello world", ["a", "b c d"], [5, 6, 7], [[5, 6], [7]]]


@pytest.fixture(scope="module")
def embedder():
    script = pathlib.Path(__file__).with_name("engines.sh")
    port = os.environ["SPLITRAIL_EMBED_PORT"]
    subprocess.run([script, "embed", port], check=True, timeout=600)
    yield Engine(int(port))
    subprocess.run([script, "stop", port], check=True, timeout=60)


@pytest.fixture(scope="module")
def embeddings(embedder):
    """A router in front of it, as `tiny-embed`."""
    folder = pathlib.Path(os.environ["SPLITRAIL_TEST_LOGS"]) / "embeddings"
    workers = [routers.worker("e0", "both", embedder)]
    yaml = routers.embedding_config(os.environ["SPLITRAIL_MODEL_PATH"], workers)
    with routers.running(os.environ["SPLITRAIL_BIN"], yaml, folder) as router:
        yield router


@pytest.mark.parametrize("given", INPUTS, ids=["text", "texts", "ids", "lists of ids"])
def test_the_official_client_gets_the_engine_s_vectors(embeddings, embedder, given):
    own = embedder.post("/v1/embeddings", {"model": "tiny-embed", "input": given}).json()
    # The client asks for base64 unless told otherwise, and decodes it.
    for more in ({}, {"encoding_format": "float"}, {"encoding_format": "base64"}):
        reply = embeddings.openai.embeddings.create(model="tiny-embed", input=given, **more)
        assert reply.usage.prompt_tokens == own["usage"]["prompt_tokens"]
        assert reply.usage.total_tokens == own["usage"]["total_tokens"]
        assert [entry.index for entry in reply.data] == [entry["index"] for entry in own["data"]]
        if more.get("encoding_format") == "base64":
            assert all(isinstance(entry.embedding, str) for entry in reply.data)
            continue
        for entry, expected in zip(reply.data, own["data"], strict=True):
            assert entry.embedding == pytest.approx(expected["embedding"], abs=1e-4)


def test_their_tokens_are_counted_and_none_is_cached(embeddings):
    before = embeddings.metrics().sum("splitrail_prompt_tokens_total", leg="decode")
    body = {"model": "tiny-embed", "input": ["one two three", "four " * 30]}
    replies = [embeddings.post("/v1/embeddings", json=body) for _ in range(2)]
    for reply in replies:
        assert reply.status_code == 200, reply.text
        assert "cached_tokens" not in reply.headers["x-splitrail-route"]
        assert reply.json()["usage"]["prompt_tokens_details"] is None
    tokens = sum(reply.json()["usage"]["prompt_tokens"] for reply in replies)
    metrics = embeddings.metrics()
    assert metrics.sum("splitrail_prompt_tokens_total", leg="decode") - before == tokens
    assert metrics.sum("splitrail_cached_tokens_total") == 0


def test_what_the_engine_refuses_is_relayed(embeddings):
    with pytest.raises(openai.BadRequestError) as caught:
        embeddings.openai.embeddings.create(model="tiny-embed", input="x", dimensions=8)
    assert "Matryoshka" in caught.value.body["message"]
    with pytest.raises(openai.BadRequestError) as caught:
        embeddings.openai.embeddings.create(model="tiny-embed", input=[5] * 3000)
    assert caught.value.body["message"]
    with pytest.raises(openai.NotFoundError) as caught:
        embeddings.openai.completions.create(model="nobody", prompt="x")
    assert caught.value.body["code"] == "model_not_found"


def test_a_pair_that_generates_has_no_embeddings(router):
    for _ in range(3):
        with pytest.raises(openai.NotFoundError) as caught:
            router.openai.embeddings.create(model="tiny", input="x")
        assert caught.value.body["code"] == "not_offered"
    assert router.metrics().sum("splitrail_worker_breaker_open") == 0
    assert router.complete([5] * 100).usage.completion_tokens == 8


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/tokenize", {"prompt": "h\u00e9llo w\u00f6rld", "return_token_strs": True}),
        ("/tokenize", {"prompt": "x", "add_special_tokens": False}),
        ("/tokenize", {"messages": [{"role": "user", "content": "hello"}]}),
        (
            "/tokenize",
            {
                "messages": [{"role": "assistant", "content": "so"}],
                "continue_final_message": True,
                "add_generation_prompt": False,
            },
        ),
        ("/detokenize", {"tokens": [281, 78, 331]}),
        ("/detokenize", {"tokens": []}),
    ],
)
def test_tokens_and_texts_are_the_engine_s_byte_for_byte(router, decode, path, body):
    body = {"model": "tiny", **body}
    own = decode.post(path, body)
    told = router.post(path, json=body)
    assert (told.status_code, told.content) == (own.status_code, own.content)
    assert own.status_code == 200, own.text


def test_what_a_tokenizer_refuses_is_relayed(router, decode):
    body = {"model": "tiny", "tokens": [2**63 - 1]}
    own, told = decode.post("/detokenize", body), router.post("/detokenize", json=body)
    assert (told.status_code, own.status_code) == (400, 400)
    assert told.json()["error"]["message"] == own.json()["error"]["message"]
    assert router.post("/tokenize", json={"prompt": "x"}).status_code == 400, "whose, of two models?"
