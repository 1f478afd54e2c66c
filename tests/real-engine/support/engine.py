"""A running vLLM server, asked directly, to verify what the router claims."""

import re

import httpx

from . import plain_http
from .metrics import Metrics

BLOCK_SIZE = 32
SOURCES = ("local_compute", "local_cache_hit", "external_kv_transfer")


def full_hit(prompt_tokens):
    """Cached tokens of a prompt that is entirely cached.

    The engine always computes the last token, so a prompt of whole blocks hits one less.
    """
    return (prompt_tokens - 1) // BLOCK_SIZE * BLOCK_SIZE


class Engine:
    def __init__(self, port):
        self.port = port
        self.url = f"http://127.0.0.1:{port}"
        self.kv_events = f"tcp://127.0.0.1:{port + 1000}"
        self.kv_replay = f"tcp://127.0.0.1:{port + 2000}"
        # Of a prefill engine with Mooncake.
        self.bootstrap = f"http://127.0.0.1:{port + 3000}"

    def metrics(self):
        return Metrics.scrape(f"{self.url}/metrics")

    def prompt_tokens_by_source(self, **labels):
        """Where the tokens of all prompts so far came from, by the engine's own count."""
        metrics = self.metrics()
        name = "vllm:prompt_tokens_by_source_total"
        return {source: int(metrics.sum(name, source=source, **labels)) for source in SOURCES}

    def prefix_cache(self):
        """Prompt tokens that the engine has looked up in its own cache, and those found there."""
        metrics = self.metrics()
        names = ("vllm:prefix_cache_queries_total", "vllm:prefix_cache_hits_total")
        return tuple(int(metrics.sum(name)) for name in names)

    def running_requests(self):
        metrics = self.metrics()
        return metrics.sum("vllm:num_requests_running") + metrics.sum("vllm:num_requests_waiting")

    def kv_usage(self):
        """Fraction of KV blocks in use; blocks that are only cached do not count."""
        return self.metrics().sum("vllm:kv_cache_usage_perc")

    def kv_blocks(self):
        """KV blocks that the engine has."""
        info = plain_http.get(f"{self.url}/metrics", timeout=30).text
        return int(re.search(r'num_gpu_blocks="(\d+)"', info).group(1))

    def blocks_in_use(self):
        """The same in blocks. Of all, one never holds anything."""
        return round(self.kv_usage() * (self.kv_blocks() - 1))

    def generated_tokens(self):
        return int(self.metrics().sum("vllm:generation_tokens_total"))

    def is_healthy(self):
        try:
            return plain_http.get(f"{self.url}/health", timeout=10).status_code == 200
        except httpx.TransportError:
            return False

    def post(self, path, body, **kwargs):
        """A raw request to the engine itself."""
        return httpx.post(f"{self.url}{path}", json=body, timeout=60, **kwargs)

    def tokenize(self, **body):
        """Token ids of `prompt=` or `messages=`, as the engine sees them."""
        reply = httpx.post(f"{self.url}/tokenize", json={"model": "tiny", **body}, timeout=30)
        reply.raise_for_status()
        return reply.json()["tokens"]
