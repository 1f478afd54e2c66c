"""A fleet appears, changes, drains and leaves by what the API server says of its pods alone."""

import httpx

from cluster import traffic as clients
from cluster.pods import APP_LABEL, ROLE_LABEL
from support.waiting import eventually


def test_pods_become_workers_once_they_are_ready(start_router, fleet, model):
    with start_router() as router:
        eventually(lambda: "found in Kubernetes" in router.log(), bool, "an empty list is found")
        for name in ("prefill", "decode"):
            fleet.create(name, name, fleet.engine(name, name))
            fleet.set_status(name, ready=False)
        fleet.set_status("prefill")
        router.wait_for("prefill")
        fleet.set_status("decode")
        router.wait_for("decode", "prefill")
        with clients.running(router, model):
            pass
        assert router.errors() == 0, router.log()


def test_changes_of_pods_lose_no_request(serving, fleet, pair):
    router, traffic = serving

    def but(name):
        return [other for other in pair if other != name]

    fleet.set_status("decode-1", ready=False)
    router.wait_for(*but("decode-1"))
    traffic.goes_on()
    fleet.set_status("decode-1")
    router.wait_for(*pair)
    # A pod that no longer matches the selector has left, and one that matches again is a new one.
    fleet.set_labels("prefill-1", **{APP_LABEL: "maintenance"})
    router.wait_for(*but("prefill-1"))
    traffic.goes_on()
    fleet.set_labels("prefill-1", **{APP_LABEL: "vllm"})
    router.wait_for(*pair)
    # Its engine serves both legs: the label decides.
    fleet.start("either", "both")
    fleet.set_labels("either", **{ROLE_LABEL: "prefill"})
    router.wait_for("either", *pair)
    assert router.workers()["either"]["role"] == "prefill"
    fleet.set_labels("either", **{ROLE_LABEL: "decode"})
    eventually(lambda: router.workers()["either"]["role"], lambda role: role == "decode", "its role")
    router.wait_for("either", *pair)
    traffic.goes_on()
    # A pod that is started again has another address.
    engine = fleet.start("moving", "decode")
    router.wait_for("either", "moving", *pair)
    ports = [f"--{kind.replace('_', '-')}-port={port}" for kind, port in engine.ports.items()]
    fleet.engine("moved", "decode", "--host=127.0.0.2", *ports)
    fleet.set_status("moving", ip="127.0.0.2")
    url = f"http://127.0.0.2:{engine.http}"
    eventually(lambda: router.workers()["moving"]["url"], lambda now: now == url, "its address")
    router.wait_for("either", "moving", *pair)
    traffic.goes_on()
    assert router.errors() == 0, router.log()


def test_a_pod_that_is_deleted_drains_before_it_leaves(serving, fleet, pair, model):
    router, traffic = serving
    streams = [LongStream(router, model) for _ in range(4)]
    for stream in streams:
        stream.begin()
    busy = next(id for id in ("decode-0", "decode-1") if requests_on(router, id))
    fleet.delete(busy)
    left = [id for id in pair if id != busy]
    router.wait_for(*left)
    assert busy in fleet.names(), "the pod waits for its kubelet"
    for stream in streams:
        stream.end()
    traffic.goes_on()
    eventually(lambda: requests_on(router, busy), lambda now: now == 0, f"{busy} has drained")
    fleet.stop(busy)
    fleet.remove(busy)
    traffic.goes_on()
    # A pod of a StatefulSet comes back under its name.
    fleet.start(busy, "decode")
    router.wait_for(*pair)
    assert router.errors() == 0, router.log()


def test_a_whole_fleet_is_replaced_one_pod_after_the_other(serving, fleet, pair):
    router, traffic = serving
    present = set(pair)
    for old in pair:
        role = old.split("-")[0]
        fleet.start(f"new-{old}", role)
        present.add(f"new-{old}")
        router.wait_for(*present)
        fleet.delete(old)
        present.remove(old)
        router.wait_for(*present)
        eventually(lambda: requests_on(router, old), lambda now: now == 0, f"{old} has drained")
        fleet.stop(old)
        fleet.remove(old)
        traffic.goes_on()


def test_a_source_that_a_reload_removes_is_no_longer_watched(
    control_plane, start_router, config, pair
):
    with start_router() as router:
        router.wait_for(*pair)
        assert control_plane.watches_of_pods() == 1
        (model,) = config["models"]
        role = model["discovery"][0] | {"selector": "app=nobody"}
        router.reload(config | {"models": [model | {"discovery": [role]}]})
        eventually(router.workers, lambda workers: workers == {}, "no worker is left")
        eventually(control_plane.watches_of_pods, lambda now: now == 1, "one watch is left")
        pods = [line for line in router.metrics_text() if "discovery_workers{" in line]
        assert len(pods) == 1 and "app=nobody" in pods[0], pods


def requests_on(router, worker):
    return int(router.metrics().sum("splitrail_worker_requests", worker=worker))


class LongStream:
    """A streamed reply of some seconds."""

    STEPS = 300

    def __init__(self, router, model):
        body = {"model": model, "prompt": list(range(100, 164)), "stream": True}
        body |= {"max_tokens": self.STEPS, "ignore_eos": True}
        self._client = httpx.Client(timeout=120, verify=False)
        self._request = self._client.build_request("POST", f"{router.http}/v1/completions", json=body)

    def begin(self):
        """Returns once the reply has begun."""
        self._reply = self._client.send(self._request, stream=True)
        assert self._reply.status_code == 200, self._reply.read()
        self._lines = self._reply.iter_lines()
        assert next(self._lines).startswith("data: ")

    def end(self):
        """Takes the whole reply."""
        lines = [line for line in self._lines if line]
        self._client.close()
        assert lines[-1] == "data: [DONE]", lines[-3:]
        assert len(lines) >= self.STEPS - 1, len(lines)
