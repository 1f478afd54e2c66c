"""A router whose clients have keys of tenants, in front of the real pair."""

import dataclasses
import secrets

from . import dialects, prompts
from .engine import BLOCK_SIZE
from .front_door import FrontDoor
from .waiting import eventually, settled

# `red` and `blue` share a cache; every other tenant has one of its own.
TENANTS = """\
tenants:
  - { name: acme }
  - { name: beta }
  - { name: red, cache: { shared: colours } }
  - { name: blue, cache: { shared: colours } }
"""
NAMES = ("acme", "beta", "red", "blue")


class Conversation:
    """New text of many blocks, for any endpoint."""

    def __init__(self):
        self.system = f"You are terse. Case {secrets.token_hex(8)}."
        self.said = prompts.TEXTS["code"] * 6

    @property
    def plain(self):
        return f"{self.system}\n{self.said}"

    @property
    def messages(self):
        return [
            {"role": "system", "content": self.system},
            {"role": "user", "content": self.said},
        ]

    def tokens(self, endpoint, engine):
        """The number of tokens of the prompt, by the engine's own tokenizer."""
        is_plain = endpoint in ("completions", "grpc")
        prompt = {"prompt": self.plain} if is_plain else {"messages": self.messages}
        return len(engine.tokenize(**prompt))


def _salted(salt):
    return {} if salt is None else {"cache_salt": salt}


def _counted(answer):
    usage = answer.usage
    return answer.request_id, usage.prompt_tokens, answer.cached_tokens


def _chat(router, conversation, salt):
    return _counted(router.chat(conversation.messages, extra_body=_salted(salt)))


def _completion(router, conversation, salt):
    return _counted(router.complete(conversation.plain, extra_body=_salted(salt)))


def _in_dialect(dialect):
    def ask(router, conversation, salt):
        answer = dialect(router).ask(conversation.system, conversation.said, **_salted(salt))
        return answer.request_id, answer.prompt_tokens, answer.cached_tokens

    return ask


def _grpc(router, conversation, salt):
    request_id = f"test-{secrets.token_hex(8)}"
    with FrontDoor(router.grpc, router.key) as front_door:
        _, usage = front_door.generate(
            model="tiny",
            text=conversation.plain,
            sampling={"max_tokens": 8, "temperature": 0, "ignore_eos": True},
            request_id=request_id,
            **_salted(salt),
        )
    assert usage.cached_source == 1, "the figure is the engine's"
    return request_id, usage.prompt_tokens, usage.cached_tokens


ENDPOINTS = {
    "chat": _chat,
    "completions": _completion,
    "messages": _in_dialect(dialects.Messages),
    "responses": _in_dialect(dialects.Responses),
    "grpc": _grpc,
}


@dataclasses.dataclass
class Asked:
    """What a client and the engines said about one request."""

    prompt_tokens: int
    # What the reply reported.
    cached_tokens: int
    # Prompt tokens that each engine of the request found in its own cache, by its own count.
    hits: dict
    # The router's record of the decision.
    record: dict

    def assert_cold(self):
        """No engine found a block of the prompt for this request, and the router expected none."""
        seen = self.cached_tokens, self.hits, self.record["overlap_blocks"]
        assert seen == (0, {"p0": 0, "d0": 0}, 0), seen


class Cluster:
    """The router, one client for each tenant, and the engines by worker id."""

    def __init__(self, router, flow, keys, engines):
        self.router, self.flow, self.engines = router, flow, engines
        self._clients = {tenant: router.with_key(key) for tenant, key in keys.items()}

    def await_own_prompts(self):
        """Returns once the router has sent its own prompts, and the engines have counted them.

        They are one to test the parity of each worker, and one to learn whether it honours
        `cache_hit_threshold`, which may come later.
        """

        def seen():
            workers = [known for known in self.router.workers() if known["model"] == "tiny"]
            return {known["id"]: known["parity"] for known in workers}, self.router.is_ready()

        parity = {"p0": "ok", "d0": "ok"}
        eventually(seen, lambda seen: seen == (parity, True), "agreement on blocks, and readiness")
        for engine in self.engines.values():
            settled(engine.prefix_cache)

    def ask(self, tenant, endpoint, conversation, salt=None):
        before = {worker: engine.prefix_cache() for worker, engine in self.engines.items()}
        request_id, prompt_tokens, cached_tokens = ENDPOINTS[endpoint](
            self._clients[tenant], conversation, salt
        )
        record = self.router.decision(request_id)
        workers = [record["prefill_worker"], record["decode_worker"]]
        hits = {
            worker: self._hits(worker, before[worker], prompt_tokens)
            for worker in workers
            if worker is not None
        }
        return Asked(prompt_tokens, cached_tokens, hits, record)

    def ask_cold(self, tenant, endpoint, conversation, salt=None):
        """Asks, proves that nothing of the prompt was cached, and waits for the router's index."""
        blocks = conversation.tokens(endpoint, self.engines["p0"]) // BLOCK_SIZE
        computing = "p0" if self.flow == "prefill_first" else "d0"
        with self.router.indexing(computing, blocks):
            asked = self.ask(tenant, endpoint, conversation, salt)
            # Before the index is waited for, which does not grow by what was cached.
            asked.assert_cold()
        return asked

    def _hits(self, worker, before, prompt_tokens):
        def grown():
            now = self.engines[worker].prefix_cache()
            return tuple(after - earlier for after, earlier in zip(now, before))

        looked_up, hits = eventually(
            grown, lambda grown: grown[0] >= prompt_tokens, f"the lookup of a prompt at {worker}"
        )
        assert looked_up == prompt_tokens, f"{looked_up} tokens at {worker}, not {prompt_tokens}"
        return hits
