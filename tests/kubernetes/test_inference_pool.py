"""Workers by an InferencePool: the pool names pods and ports, and may change or be missing."""

import pathlib
import socket

import pytest
import yaml

from cluster import chart as charts
from cluster.control_plane import DEFINITIONS, NAMESPACE
from support.waiting import eventually

POOLS = f"/apis/inference.networking.k8s.io/v1/namespaces/{NAMESPACE}/inferencepools"
# Each pod has an address, and the same ports as all others.
PODS = {"prefill": "127.0.0.11", "decode": "127.0.0.12"}


def two_free_ports():
    """Ports that are free on the addresses of all pods."""
    with socket.socket() as one, socket.socket() as other:
        for any_address in (one, other):
            any_address.bind(("0.0.0.0", 0))
        return one.getsockname()[1], other.getsockname()[1]


@pytest.fixture
def config(config):
    """That of the chart's example with an InferencePool; engines tell their ports of KV events."""
    example = yaml.safe_load(charts.by_kind("inference-pool")["ConfigMap"]["data"]["splitrail.yaml"])
    config["models"][0]["discovery"] = example["models"][0]["discovery"]
    return config


@pytest.fixture
def role(control_plane, chart, user):
    """The chart's Role for pools instead of that for pods."""
    role = charts.by_kind("inference-pool")["Role"]
    control_plane.replace_resource(role)
    may = control_plane.permission(user, "watch", "inferencepools", "inference.networking.k8s.io")
    eventually(may, bool, "the Role counts")
    yield role
    control_plane.replace_resource(chart["Role"])


@pytest.fixture
def installed(control_plane):
    """Installs the resource's definition when it is called."""
    definition = yaml.safe_load((pathlib.Path(__file__).parent / "inference_pool.yaml").read_text())
    path = f"{DEFINITIONS}/{definition['metadata']['name']}"

    def install():
        control_plane.create(DEFINITIONS, definition)
        eventually(lambda: control_plane.has(POOLS), bool, "pools are served")

    yield install
    control_plane.ask("DELETE", path)
    # Not before is the next one a new one.
    eventually(lambda: control_plane.has(path), lambda there: not there, "it is removed")


@pytest.fixture
def pool(control_plane, config):
    return Pool(control_plane, config["models"][0]["discovery"][0]["inference_pool"])


class Pool:
    def __init__(self, control_plane, name):
        self._control_plane, self._name = control_plane, name

    def create(self, *ports, **labels):
        spec = self._spec(ports, labels)
        pool = {"apiVersion": "inference.networking.k8s.io/v1", "kind": "InferencePool"}
        self._control_plane.create(POOLS, pool | {"metadata": {"name": self._name}, "spec": spec})

    def change(self, *ports, **labels):
        # A merge would keep the labels of before.
        self._control_plane.ask(
            "PATCH",
            f"{POOLS}/{self._name}",
            [{"op": "replace", "path": "/spec", "value": self._spec(ports, labels)}],
            content_type="application/json-patch+json",
        )

    def delete(self):
        self._control_plane.ask("DELETE", f"{POOLS}/{self._name}")

    @staticmethod
    def _spec(ports, labels):
        picker = {"name": "picker", "port": {"number": 9002}}
        ports = [{"number": port} for port in ports]
        return {
            "selector": {"matchLabels": labels}, "targetPorts": ports, "endpointPickerRef": picker
        }


@pytest.fixture
def ranks(fleet, config):
    """Pods with two engines each, on the same two ports; returns the ports."""
    label = config["models"][0]["discovery"][0]["role_label"]
    ports = two_free_ports()
    for role, address in PODS.items():
        for port in ports:
            options = [f"--host={address}", f"--http-port={port}"]
            engine = fleet.engine(f"{role}-{port}", role, *options)
        fleet.create(role, role, engine)
        fleet.set_labels(role, **{label: role, "app": "ranks"})
        fleet.set_status(role, ip=address)
    return ports


def test_a_pool_decides_which_pods_are_workers_at_which_ports(
    start_router, fleet, installed, role, pool, ranks, config
):
    installed()
    first, second = ranks
    pool.create(first, app="ranks")
    with start_router() as router:
        router.wait_for("decode", "prefill")
        assert router.workers()["decode"]["url"] == f"http://{PODS['decode']}:{first}"
        pool.change(first, second, app="ranks")
        both = [f"{role}-{port}" for role in PODS for port in ranks]
        router.wait_for(*both)
        assert router.workers()[f"decode-{second}"]["url"] == f"http://{PODS['decode']}:{second}"
        fleet.set_status("decode", ready=False, ip=PODS["decode"])
        router.wait_for(*[f"prefill-{port}" for port in ranks])
        fleet.set_status("decode", ip=PODS["decode"])
        router.wait_for(*both)
        pool.change(first, second, app="nobody")
        eventually(router.workers, lambda workers: workers == {}, "no worker is left")
        pool.change(second, app="ranks")
        router.wait_for("decode", "prefill")
        assert router.workers()["decode"]["url"] == f"http://{PODS['decode']}:{second}"
        pool.delete()
        eventually(router.workers, lambda workers: workers == {}, "no worker is left")
        router.wait_for_log("the InferencePool has no workers", "does not exist")
        pool.create(first, app="ranks")
        router.wait_for("decode", "prefill")
        assert router.errors() == 0, router.log()
    pool.delete()


def test_a_pool_whose_kind_is_not_installed_is_found_later(
    start_router, installed, role, pool, ranks
):
    with start_router() as router:
        router.wait_for_log("the InferencePool cannot be watched", "404")
        installed()
        pool.create(ranks[0], app="ranks")
        router.wait_for("decode", "prefill")
    pool.delete()


def test_a_permission_for_pools_that_is_lacking_is_named_and_can_be_granted(
    control_plane, chart, user, start_router, installed, role, pool, ranks
):
    installed()
    pool.create(ranks[0], app="ranks")
    control_plane.replace_resource(chart["Role"])
    may = control_plane.permission(user, "list", "inferencepools", "inference.networking.k8s.io")
    eventually(may, lambda allowed: not allowed, "the Role counts")
    with start_router() as router:
        router.wait_for_log(
            "the InferencePool cannot be watched", 'cannot list resource \\"inferencepools\\"'
        )
        control_plane.replace_resource(role)
        router.wait_for("decode", "prefill")
    pool.delete()


def test_a_pool_stays_as_it_is_while_the_api_server_is_away(
    control_plane, start_router, installed, role, pool, ranks
):
    installed()
    first, second = ranks
    pool.create(first, app="ranks")
    with start_router() as router:
        router.wait_for("decode", "prefill")
        with router.frozen():
            pool.change(second, app="ranks")
            control_plane.kill_api_server()
            control_plane.compact()
            control_plane.start_api_server()
        url = f"http://{PODS['decode']}:{second}"
        eventually(lambda: router.workers()["decode"]["url"], lambda now: now == url, "its port")
        router.wait_for("decode", "prefill")
    pool.delete()
