"""A running `splitrail serve` and what its clients see."""

import contextlib
import http.client
import json
import secrets

import anthropic
import httpx
import openai

from . import log_probabilities, plain_http, process
from .engine import BLOCK_SIZE, SOURCES, Engine
from .metrics import Metrics
from .waiting import eventually, settled

CONFIG = """\
listen:
  http: 127.0.0.1:0
  grpc: 127.0.0.1:0
  admin: 127.0.0.1:0
{top}models:
  - name: tiny
    block_size: {block_size}
    tokenizer: {{ kind: huggingface, path: "{model_path}" }}
    flow: {flow}
    connector: {connector}
    policy: {{ kind: {policy} }}
    local_prefill_max_tokens: 32
    # Once, before it is ready: later it would be among what tests count.
    canary: {{ interval: 24h }}
{more}    workers:
{workers}
  # An engine of the same model, used alone: what a P/D answer is compared with.
  - name: tiny-aggregated
    block_size: {block_size}
    tokenizer: {{ kind: huggingface, path: "{model_path}" }}
    flow: aggregated
    connector: none
    policy: {{ kind: round_robin }}
    canary: {{ enabled: false }}
    workers:
      - {{ id: a0, role: both, url: "{aggregated_url}" }}
"""

# A model whose only worker embeds.
EMBEDDING = """\
listen:
  http: 127.0.0.1:0
  admin: 127.0.0.1:0
models:
  - name: tiny-embed
    block_size: {block_size}
    tokenizer: {{ kind: huggingface, path: "{model_path}" }}
    flow: aggregated
    connector: none
    workers:
{workers}
"""

# A hybrid model, whose block size the engines decide.
HYBRID = """\
listen:
  http: 127.0.0.1:0
  admin: 127.0.0.1:0
models:
  - name: tiny
    tokenizer: {{ kind: huggingface, path: "{model_path}" }}
    flow: {flow}
    connector: {connector}
    canary: {{ interval: 24h }}
    workers:
{workers}
"""

# A model with an adapter, on one worker.
ADAPTER = """\
listen:
  http: 127.0.0.1:0
  admin: 127.0.0.1:0
models:
  - name: tiny
    adapters: [{adapter}]
    block_size: {block_size}
    tokenizer: {{ kind: huggingface, path: "{model_path}" }}
    flow: aggregated
    connector: none
    policy: {{ kind: kv_overlap }}
    canary: {{ interval: 24h }}
    workers:
{workers}
"""

# Only the engines' addresses; all else is asked of them, or follows.
FIVE_LINES = """\
listen: {{ http: 127.0.0.1:0, admin: 127.0.0.1:0 }}
models:
  - name: tiny
    tokenizer: {model_path}
    prefill: ["{prefill_url}"]
    decode: ["{decode_url}"]
"""


def five_lines(model_path, prefill, decode):
    return FIVE_LINES.format(
        model_path=model_path, prefill_url=prefill.url, decode_url=decode.url
    )


def worker(id, role, engine, bootstrap=None):
    more = f', bootstrap: "{bootstrap}"' if bootstrap else ""
    return (
        f'      - {{ id: {id}, role: {role}, url: "{engine.url}", '
        f'kv_events: "{engine.kv_events}", kv_replay: "{engine.kv_replay}"{more} }}'
    )


def worker_without_events(id, role, engine):
    return f'      - {{ id: {id}, role: {role}, url: "{engine.url}", kv_events: none }}'


def unreachable_worker(id, role):
    # Port 1 of the loopback: connections are refused at once.
    return f'      - {{ id: {id}, role: {role}, url: "http://127.0.0.1:1" }}'


def config(
    model_path,
    aggregated,
    workers,
    policy="kv_overlap",
    flow="prefill_first",
    connector="nixl",
    more=(),
    top="",
):
    """`more` are further lines of the model `tiny`, `top` further sections of the file."""
    return CONFIG.format(
        block_size=BLOCK_SIZE,
        model_path=model_path,
        workers="\n".join(workers),
        aggregated_url=aggregated.url,
        policy=policy,
        flow=flow,
        connector=connector,
        top=top,
        more="".join(f"    {line}\n" for line in more),
    )


def embedding_config(model_path, workers):
    workers = "\n".join(workers)
    return EMBEDDING.format(block_size=BLOCK_SIZE, model_path=model_path, workers=workers)


def adapter_config(model_path, adapter, workers):
    workers = "\n".join(workers)
    return ADAPTER.format(
        adapter=adapter, block_size=BLOCK_SIZE, model_path=model_path, workers=workers
    )


def hybrid_config(model_path, workers, flow="aggregated", connector="none"):
    workers = "\n".join(workers)
    return HYBRID.format(model_path=model_path, workers=workers, flow=flow, connector=connector)


class Router:
    """A router, as clients with one key see it."""

    def __init__(self, ready, key="unused"):
        self._ready = ready
        self.http = f"http://{ready['http']}"
        self.admin = f"http://{ready['admin']}"
        # `HOST:PORT`; absent where the configuration has no gRPC listener.
        self.grpc = ready.get("grpc")
        self.key = key
        # No retries of the client's own: they would hide the router's failures.
        self.openai = openai.OpenAI(
            base_url=f"{self.http}/v1", api_key=key, max_retries=0, timeout=120
        )
        self.anthropic = anthropic.Anthropic(
            base_url=self.http, api_key=key, max_retries=0, timeout=120
        )

    def with_key(self, key):
        """The same router for clients with another key."""
        return Router(self._ready, key)

    def post(self, path, **kwargs):
        """A raw request, for what the OpenAI client would not send or show."""
        return httpx.post(f"{self.http}{path}", timeout=120, **kwargs)

    @contextlib.contextmanager
    def leaving(self, body):
        """Sends a completion whose client hangs up after the body of this context."""
        connection = http.client.HTTPConnection(self.http.removeprefix("http://"))
        with contextlib.closing(connection):
            headers = {"content-type": "application/json"}
            connection.request("POST", "/v1/completions", json.dumps(body), headers)
            yield

    def metrics(self):
        return Metrics.scrape(f"{self.admin}/metrics")

    def prompt_tokens_by_source(self, leg):
        """The ledger's prompt tokens of a leg. Engines count what a prefill leg reads as transferred."""
        metrics = self.metrics()

        def tokens(source):
            labels = {"model": "tiny", "leg": leg, "source": source}
            return int(metrics.sum("splitrail_prompt_tokens_total", **labels))

        counts = {source: tokens(source) for source in SOURCES}
        counts["external_kv_transfer"] += tokens("read_back") + tokens("fetched")
        return counts

    def workers(self):
        """Every worker of every model, as the router sees it now."""
        reply = plain_http.get(f"{self.admin}/admin/workers", timeout=30)
        reply.raise_for_status()
        return reply.json()["workers"]

    @contextlib.contextmanager
    def draining(self, worker):
        """Takes a worker out of service for as long as the body runs."""
        url = f"{self.admin}/admin/workers/{worker}/drain"
        httpx.post(url, json={}, timeout=30).raise_for_status()
        try:
            yield
        finally:
            httpx.delete(url, timeout=30).raise_for_status()

    def is_ready(self):
        return plain_http.get(f"{self.http}/ready", timeout=30).status_code == 200

    def requests_in_flight(self):
        return self.metrics().sum("splitrail_requests_in_flight")

    def index_blocks(self, worker):
        return int(self.metrics().sum("splitrail_index_blocks", model="tiny", worker=worker))

    def decision(self, request_id):
        """The record that the router wrote when it decided, before any engine answered."""

        def read():
            reply = plain_http.get(
                f"{self.admin}/admin/decisions", params={"request_id": request_id}, timeout=30
            )
            reply.raise_for_status()
            return reply.json()["decisions"]

        found = eventually(read, bool, f"the decision on {request_id}")
        assert len(found) == 1, found
        return found[0]

    def explain(self, path, **body):
        """What the router would do with a request for `tiny`."""
        url, params = f"{self.admin}/admin/explain", {"endpoint": path}
        body = {"model": "tiny", "max_tokens": 8, **body}
        reply = httpx.post(url, params=params, json=body, timeout=30)
        reply.raise_for_status()
        return reply.json()

    def index_state(self, worker):
        """How many blocks the index holds of a worker, and a digest of which."""
        reply = plain_http.get(f"{self.admin}/admin/workers/{worker}/index", timeout=30)
        reply.raise_for_status()
        return self.index_blocks(worker), [rank["digest"] for rank in reply.json()["ranks"]]

    @contextlib.contextmanager
    def indexing(self, worker, blocks):
        """Runs the body and returns once the index knows `blocks` more blocks of `worker`.

        An engine whose cache is full drops a block for each new one: of that, only the digest
        tells.
        """
        url = next(known["url"] for known in self.workers() if known["id"] == worker)
        before, digest = settled(lambda: self.index_state(worker))
        # Blocks that are not full, or wait for somebody, are in no index.
        capacity = Engine(int(url.rsplit(":", 1)[1])).kv_blocks()
        is_full = before + blocks >= capacity * 9 // 10
        yield
        eventually(
            lambda: self.index_state(worker),
            lambda now: now[0] - before >= blocks or (is_full and now[1] != digest),
            f"growth of the index for {worker} from {before} by {blocks} blocks",
        )
        if is_full:
            settled(lambda: self.index_state(worker))

    def complete(self, prompt, model="tiny", max_tokens=8, **kwargs):
        """A greedy completion with log-probabilities; see `Answer`."""
        create = self.openai.completions.create
        return self._ask(create, model, max_tokens, log_probabilities.COMPLETION, kwargs, prompt=prompt)

    def chat(self, messages, model="tiny", max_tokens=8, **kwargs):
        """A greedy chat completion with log-probabilities; see `Answer`."""
        create = self.openai.chat.completions.create
        return self._ask(create, model, max_tokens, log_probabilities.CHAT, kwargs, messages=messages)

    def _ask(self, create, model, max_tokens, asked, kwargs, **prompt):
        request_id = f"test-{secrets.token_hex(8)}"
        body = {"ignore_eos": True, **asked, **kwargs.pop("extra_body", {})}
        stream = kwargs.pop("stream", False)
        if stream:
            kwargs = {"stream": True, "stream_options": {"include_usage": True}, **kwargs}
        reply = create(
            model=model,
            max_tokens=max_tokens,
            temperature=kwargs.pop("temperature", 0),
            extra_headers={"x-request-id": request_id},
            extra_body=body,
            **prompt,
            **kwargs,
        )
        return Answer.streamed(request_id, reply) if stream else Answer.whole(request_id, reply)


class Answer:
    """A reply, streamed or not, in one form.

    `texts`, `finish_reasons` and `steps` (see `log_probabilities`) are by choice index; `usages` holds every
    usage seen.
    """

    def __init__(self, request_id):
        self.request_id = request_id
        self.texts, self.finish_reasons, self.steps, self.usages = {}, {}, {}, []

    @classmethod
    def whole(cls, request_id, reply):
        answer = cls(request_id)
        for choice in reply.choices:
            message = getattr(choice, "message", None)
            answer._add(choice, message.content if message else choice.text)
        answer.usages.append(reply.usage)
        return answer

    @classmethod
    def streamed(cls, request_id, chunks):
        answer = cls(request_id)
        for chunk in chunks:
            for choice in chunk.choices:
                delta = getattr(choice, "delta", None)
                answer._add(choice, delta.content if delta else choice.text)
            if chunk.usage is not None:
                answer.usages.append(chunk.usage)
        return answer

    def _add(self, choice, text):
        self.texts[choice.index] = self.texts.get(choice.index, "") + (text or "")
        logprobs = choice.logprobs.model_dump() if choice.logprobs else None
        self.steps.setdefault(choice.index, []).extend(log_probabilities.steps(logprobs))
        if choice.finish_reason:
            self.finish_reasons[choice.index] = choice.finish_reason

    @property
    def text(self):
        (text,) = self.texts.values()
        return text

    @property
    def usage(self):
        (usage,) = self.usages
        return usage

    @property
    def cached_tokens(self):
        return self.usage.prompt_tokens_details.cached_tokens


@contextlib.contextmanager
def running(binary, yaml, folder):
    """Starts `splitrail serve` with this configuration and ends it, drained, afterwards."""
    folder.mkdir(parents=True, exist_ok=True)
    config_file = folder / "splitrail.yaml"
    config_file.write_text(yaml)
    with process.running([binary, "serve", "--config", config_file], folder, "splitrail") as ready:
        yield Router(ready)
