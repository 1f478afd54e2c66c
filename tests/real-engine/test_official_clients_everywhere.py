"""The official clients for Python and JavaScript, unmodified, over everything that is served.

The engines are simulated, so that only the router and the clients are tested here. Their replies have no
log probabilities: `test_log_probabilities.py` has those of real engines.
"""

import contextlib
import os
import pathlib
import re

import pytest

from support import every_endpoint, process
from support import router as routers

CONFIG = """\
listen: {{ http: 127.0.0.1:0, admin: 127.0.0.1:0 }}
limits: {{ drain_delay: 200ms }}
models:
  - name: sim
    block_size: 16
    tokenizer: {{ kind: huggingface, path: "{model}" }}
    flow: prefill_first
    local_prefill_max_tokens: 0
    workers:
      - {{ id: p0, role: prefill, url: "http://{prefill}" }}
      - {{ id: d0, role: decode, url: "http://{decode}" }}
  - name: sim-embed
    block_size: 16
    tokenizer: {{ kind: huggingface, path: "{model}" }}
    flow: aggregated
    connector: none
    workers: [ {{ id: e0, role: both, url: "http://{embedding}" }} ]
"""
ENGINES = {
    "prefill": ["--role", "prefill"],
    "decode": ["--role", "decode", "--transcribes", "true"],
    "embedding": ["--model", "sim-embed", "--embeds", "true"],
}
BLOCK = 16

# What no official client has a method for.
OF_ENGINES = "an endpoint of vLLM or SGLang that is in neither API"
OF_THE_ROUTER = "for people, programs and probes"
WITHOUT_A_METHOD = {
    "/inference/v1/generate": OF_ENGINES,
    "/v1/score": OF_ENGINES,
    "/score": OF_ENGINES,
    "/v1/rerank": OF_ENGINES,
    "/v2/rerank": OF_ENGINES,
    "/rerank": OF_ENGINES,
    "/classify": OF_ENGINES,
    "/pooling": OF_ENGINES,
    "/tokenize": OF_ENGINES,
    "/detokenize": OF_ENGINES,
    "/openapi.json": OF_THE_ROUTER,
    "/docs": OF_THE_ROUTER,
    "/docs/docs.css": OF_THE_ROUTER,
    "/health": OF_THE_ROUTER,
    "/ready": OF_THE_ROUTER,
}


@pytest.fixture(autouse=True)
def engines_survive():
    """Takes the place of the fixture that asks the real engines, which take no part here."""


@pytest.fixture(scope="module")
def url():
    binary = os.environ["SPLITRAIL_BIN"]
    folder = pathlib.Path(os.environ["SPLITRAIL_TEST_LOGS"]) / "official-clients-everywhere"
    with contextlib.ExitStack() as stack:
        started = {
            name: stack.enter_context(
                process.running([binary, "sim-engine", *options], folder, name)
            )["http"]
            for name, options in ENGINES.items()
        }
        model = pathlib.Path(__file__).parents[2] / "crates/sim/model"
        yaml = CONFIG.format(model=model, **started)
        yield stack.enter_context(routers.running(binary, yaml, folder)).http


@pytest.fixture(scope="module")
def python(url):
    return every_endpoint.of_python(url)


@pytest.fixture(scope="module")
def javascript(url):
    return every_endpoint.of_javascript(url, os.environ["SPLITRAIL_JAVASCRIPT_CLIENTS"])


def usages(facts):
    """All usage with cached tokens."""
    told = (fact.get("usage", {}) for fact in facts.values() if isinstance(fact, dict))
    return [usage for usage in told if "cached" in usage]


def test_clients_for_python_get_what_they_ask_for(python):
    facts = python["facts"]
    assert facts["models"] == facts["models of Anthropic"] == ["sim", "sim-embed"]
    assert facts["model"] == facts["model of Anthropic"] == "sim"
    assert facts["no model"] == facts["stored response"] == facts["deleted response"] == 404
    # A stream has the text and the usage of a whole reply.
    for kind in ("chat", "completion", "response", "message"):
        whole, streamed = facts[kind], facts[f"{kind} stream"]
        assert whole["text"] and whole["usage"]["completion"] == 8
        assert (streamed["text"], streamed["usage"]) == (whole["text"], whole["usage"])
    assert facts["chat"]["text"] == facts["response"]["text"] == facts["message"]["text"]
    assert facts["chat"]["end"] == facts["chat stream"]["end"] == "length"
    assert facts["message"]["end"] == facts["message stream"]["end"] == "max_tokens"
    assert facts["response"]["status"] == "incomplete"
    assert facts["response stream"]["end"] == "response.completed"
    # Of a prompt that was asked before, all blocks are cached but for that with its last token.
    found = usages(facts)
    assert len(found) == 10
    for usage in found:
        # Anthropic's count of the prompt has no cached tokens.
        assert usage["cached"] > 0 and usage["cached"] % BLOCK == 0, usage
    chat, message = facts["chat"]["usage"], facts["message"]["usage"]
    assert chat["cached"] == (chat["prompt"] - 1) // BLOCK * BLOCK
    assert chat["prompt"] == message["prompt"] + message["cached"] == facts["count of tokens"]
    assert facts["chat with tools"]["text"]
    assert facts["chat with samples"]["usage"]["completion"] == 16
    assert len(facts["chat with samples"]["texts"]) == 2
    vectors = facts["embeddings"]["vectors"]
    assert [len(vector) for vector in vectors] == [16, 16] and vectors[0] != vectors[1]
    assert facts["embeddings"]["prompt"] == 3
    text = facts["transcription"]["text"]
    assert "70000 bytes" in text and facts["transcription stream"] == text
    assert facts["transcription"]["usage"] == {"type": "duration", "seconds": 3}
    assert facts["translation"] == text.replace("heard", "translated")


def test_clients_for_javascript_get_the_same(python, javascript):
    assert javascript["facts"] == python["facts"]


@pytest.mark.parametrize("language", ["python", "javascript"])
def test_every_path_is_asked_for_or_has_a_reason(url, language, request):
    seen = {(method, path) for method, path, _ in request.getfixturevalue(language)["seen"]}
    served = every_endpoint.served(url)

    def is_asked_for(method, path):
        pattern = re.escape(path).replace(r"\{id\}", "[^/]+")
        return any(method == asked and re.fullmatch(pattern, at) for asked, at in seen)

    asked_for = {path for method, path in served if is_asked_for(method, path)}
    missed = [(m, p) for m, p in served if p not in WITHOUT_A_METHOD and not is_asked_for(m, p)]
    assert missed == []
    assert WITHOUT_A_METHOD.keys() == {path for _, path in served} - asked_for
