"""The official clients, unmodified, over TLS with keys: their exceptions, and how they wait.

The engine is simulated, so that only the router and the clients are tested here.
"""

import concurrent.futures
import dataclasses
import os
import pathlib
import secrets
import time

import pytest

from support import official, process
from support import router as routers
from support.authority import Authority
from support.keys import Keys
from support.waiting import PATIENCE_S, eventually

CLIENTS = pytest.mark.parametrize("kind", official.BOTH, ids=lambda kind: kind.name)
# What a request with LONG tokens costs fits once into TOKENS, and a short request beside it.
LONG, TOKENS = 120, 220
LIMITS = {
    "requests": "{ requests_per_minute: 1 }",
    "tokens": f"{{ tokens_per_minute: {TOKENS} }}",
    "patient": "{ requests_per_minute: 1 }",
    "narrow": "{ requests_in_flight: 1 }",
    "daily": f"{{ tokens_per_day: {TOKENS} }}",
}
# The window of a limit per minute.
MINUTE_S = 60
# Each client has a tenant of its own for each limit.
LIMITED = {
    f"{name}-{kind.name}": limits for name, limits in LIMITS.items() for kind in official.BOTH
}
CONFIG = """\
listen:
  http: {{ address: 127.0.0.1:0, tls: {{ cert: "{cert}", key: "{key}" }} }}
  admin: 127.0.0.1:0
limits: {{ drain_delay: 200ms }}
auth: [ {{ kind: keys, file: "{keys}" }} ]
tenants:
  - {{ name: acme, models: [sim] }}
  - {{ name: unheard }}
{tenants}models:
  - name: sim
    aliases: [other]
    block_size: 16
    tokenizer: {{ kind: huggingface, path: "{model}" }}
    flow: aggregated
    connector: none
    policy: {{ kind: round_robin }}
    canary: {{ enabled: false }}
    workers: [ {{ id: w0, role: both, url: "http://{engine}" }} ]
"""


@pytest.fixture(autouse=True)
def engines_survive():
    """Takes the place of the fixture that asks the real engines, which take no part here."""


@dataclasses.dataclass
class Gate:
    """A router with TLS and keys."""

    router: routers.Router
    url: str
    trust: object
    key_file: Keys
    keys: dict

    def client(self, kind, tenant="acme", **options):
        return kind(self.url, self.keys[tenant], self.trust, **options)

    def requests(self, tenant):
        """Requests of a tenant that have ended, by the router's count."""
        return self.router.metrics().sum("splitrail_tenant_requests_total", tenant=tenant)

    def await_requests(self, tenant, count):
        """Returns once the router has counted these requests, which it does as they end."""
        what = f"the requests of {tenant}"
        eventually(lambda: self.requests(tenant), lambda ended: ended >= count, what)
        assert self.requests(tenant) == count

    def refused_credentials(self):
        return self.router.metrics().sum("splitrail_refused_credentials_total", reason="unknown")


@pytest.fixture(scope="module")
def gate():
    binary = os.environ["SPLITRAIL_BIN"]
    folder = pathlib.Path(os.environ["SPLITRAIL_TEST_LOGS"]) / "official-clients"
    authority, key_file = Authority(folder), Keys(folder)
    cert, key = authority.sign_loopback()
    keys = {tenant: key_file.new(tenant)[1] for tenant in ("acme", "unheard", *LIMITED)}
    tenants = (f"  - {{ name: {name}, limits: {limits} }}\n" for name, limits in LIMITED.items())
    engine = [binary, "sim-engine", "--decode-us-per-step", "20000"]
    with process.running(engine, folder, "engine") as started:
        yaml = CONFIG.format(
            cert=cert,
            key=key,
            keys=key_file.path,
            tenants="".join(tenants),
            model=pathlib.Path(__file__).parents[2] / "crates/sim/model",
            engine=started["http"],
        )
        with routers.running(binary, yaml, folder) as router:
            url = router.http.replace("http://", "https://")
            yield Gate(router, url, authority.trust(), key_file, keys)


@CLIENTS
def test_a_client_with_a_key_is_served(gate, kind):
    client = gate.client(kind)
    assert kind.tokens(client.ask(max_tokens=5)) == 5
    assert len(list(client.ask(stream=True))) > 1
    assert client.statuses == [200, 200]


@CLIENTS
def test_a_client_that_does_not_trust_the_authority_sends_nothing(gate, kind):
    client = kind(gate.url, gate.keys["unheard"], True, max_retries=0)
    with pytest.raises(kind.library.APIConnectionError) as caught:
        client.ask()
    assert "certificate verify failed" in str(caught.value.__cause__)
    assert client.exchanges == [] and gate.requests("unheard") == 0


@CLIENTS
def test_an_unknown_key_is_an_authentication_error_and_is_not_tried_again(gate, kind):
    before = gate.refused_credentials()
    client = kind(gate.url, f"sr-{secrets.token_urlsafe(32)}", gate.trust)
    with pytest.raises(kind.library.AuthenticationError) as caught:
        client.ask()
    expected = {
        "openai": ("invalid_request_error", "invalid_api_key"),
        "anthropic": ("authentication_error", None),
    }
    assert kind.kind_and_code(caught.value) == expected[kind.name]
    assert client.statuses == [401]
    assert client.exchanges[0].headers["www-authenticate"] == "Bearer"
    assert gate.refused_credentials() == before + 1


@CLIENTS
def test_a_revoked_key_becomes_an_authentication_error(gate, kind):
    key_id, key = gate.key_file.new("acme")
    client = kind(gate.url, key, gate.trust)

    def outcome():
        try:
            return client.ask()
        except kind.library.AuthenticationError as error:
            return error

    # The router reads the file again within about a second.
    eventually(outcome, lambda outcome: not isinstance(outcome, Exception), "the new key")
    gate.key_file.revoke(key_id)
    eventually(outcome, lambda outcome: isinstance(outcome, Exception), "the revoked key")
    assert set(client.statuses) == {200, 401}
    assert kind.tokens(gate.client(kind).ask()) == 4, "the tenant's other key is valid"


@CLIENTS
def test_a_model_of_others_is_a_permission_error_and_is_not_tried_again(gate, kind):
    client = gate.client(kind)
    with pytest.raises(kind.library.PermissionDeniedError) as caught:
        client.ask(model="other")
    expected = {
        "openai": ("permission_error", "permission_denied"),
        "anthropic": ("permission_error", None),
    }
    assert kind.kind_and_code(caught.value) == expected[kind.name]
    assert client.statuses == [403]


def assert_waited_as_told(refused, retry):
    """The client waited for as long as it was told, and not for much longer."""
    assert refused.status == 429
    assert int(refused.headers["retry-after"]) == -(-int(refused.headers["retry-after-ms"]) // 1000)
    assert "x-should-retry" not in refused.headers
    waited_s = retry.sent_at - refused.received_at
    assert refused.told_s <= waited_s < refused.told_s + PATIENCE_S


def exhaust_and_wait_in_the_client(gate, kind, limit):
    """The second request is refused once, and the client's own retry is served."""
    client = gate.client(kind, f"{limit}-{kind.name}")
    for _ in range(2):
        assert kind.tokens(client.ask(max_tokens=LONG)) == LONG
    return client.exchanges


def exhaust_and_wait_by_hand(gate, kind):
    """The same without retries of the client: an exception says how long to wait."""
    client = gate.client(kind, f"patient-{kind.name}", max_retries=0)
    client.ask()
    with pytest.raises(kind.library.RateLimitError) as caught:
        client.ask()
    expected = {
        "openai": ("requests", "rate_limit_exceeded"),
        "anthropic": ("rate_limit_error", None),
    }
    assert kind.kind_and_code(caught.value) == expected[kind.name]
    time.sleep(int(caught.value.response.headers["retry-after-ms"]) / 1000)
    client.ask()
    return client.exchanges


def test_clients_sleep_as_told_and_are_served_after_the_window(gate):
    # All at once, because each waits for the window of a minute to end.
    with concurrent.futures.ThreadPoolExecutor(6) as pool:
        waiting = {}
        for kind in official.BOTH:
            for limit in ("requests", "tokens"):
                run = pool.submit(exhaust_and_wait_in_the_client, gate, kind, limit)
                waiting[f"{limit}-{kind.name}"] = run
            run = pool.submit(exhaust_and_wait_by_hand, gate, kind)
            waiting[f"patient-{kind.name}"] = run
        ended = {tenant: run.result() for tenant, run in waiting.items()}
    for tenant, exchanges in ended.items():
        assert [exchange.status for exchange in exchanges] == [200, 429, 200], tenant
        served, refused, retry = exchanges
        assert_waited_as_told(refused, retry)
        # A minute is any 60 seconds, and not a minute of the clock.
        assert refused.received_at + refused.told_s >= served.sent_at + MINUTE_S, tenant
        gate.await_requests(tenant, 3)


@CLIENTS
def test_a_client_gives_up_after_its_own_number_of_retries(gate, kind):
    tenant = f"narrow-{kind.name}"
    client = gate.client(kind, tenant)
    with client.ask(max_tokens=2000, stream=True) as stream:
        next(iter(stream))
        refused = gate.client(kind, tenant)
        with pytest.raises(kind.library.RateLimitError):
            refused.ask()
        # The clients retry twice by default.
        assert refused.statuses == [429, 429, 429]
        for earlier, later in zip(refused.exchanges, refused.exchanges[1:]):
            assert_waited_as_told(earlier, later)
        gate.await_requests(tenant, 3)
    # The stream has ended, and its place is free.
    gate.await_requests(tenant, 4)
    assert kind.tokens(refused.ask()) == 4


@CLIENTS
def test_a_daily_quota_that_is_used_up_is_not_tried_again(gate, kind):
    tenant = f"daily-{kind.name}"
    client = gate.client(kind, tenant)
    assert kind.tokens(client.ask(max_tokens=LONG)) == LONG
    with pytest.raises(kind.library.RateLimitError) as caught:
        client.ask(max_tokens=LONG)
    expected = {
        "openai": ("insufficient_quota", "insufficient_quota"),
        "anthropic": ("rate_limit_error", None),
    }
    assert kind.kind_and_code(caught.value) == expected[kind.name]
    assert client.statuses == [200, 429]
    headers = client.exchanges[-1].headers
    assert headers["x-should-retry"] == "false"
    assert not {"retry-after", "retry-after-ms"} & headers.keys()
    gate.await_requests(tenant, 2)
    assert kind.tokens(client.ask()) == 4, "what is left of the quota can be used"
