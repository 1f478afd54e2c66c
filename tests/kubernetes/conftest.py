"""Fixtures: one control plane for all tests; engines, pods, service account files and routers of each."""

import os
import pathlib
import re

import pytest

pytest.register_assert_rewrite("cluster", "support")

from cluster import chart as charts  # noqa: E402
from cluster import router as routers  # noqa: E402
from cluster import traffic as clients  # noqa: E402
from cluster.account import AccountFiles  # noqa: E402
from cluster.control_plane import NAMESPACE, ControlPlane  # noqa: E402
from cluster.pods import Fleet  # noqa: E402
from support.waiting import eventually  # noqa: E402

BINARY = os.environ["SPLITRAIL_BIN"]


@pytest.fixture(scope="session")
def logs():
    return pathlib.Path(os.environ["SPLITRAIL_TEST_LOGS"])


@pytest.fixture(scope="session")
def control_plane(logs):
    ports = map(int, os.environ["SPLITRAIL_KUBERNETES_PORTS"].split())
    servers = os.environ["SPLITRAIL_KUBERNETES_SERVERS"]
    with ControlPlane(logs / "control-plane", servers, ports).running() as control_plane:
        yield control_plane


@pytest.fixture(scope="session")
def chart(control_plane):
    """What the chart makes for routers that look for engines among the pods, by kind, in the cluster."""
    by_kind = charts.by_kind("pod-discovery")
    for resource in by_kind.values():
        control_plane.create_resource(resource)
    return by_kind


@pytest.fixture
def folder(logs, request):
    return logs / re.sub(r"\W+", "-", request.node.name)


@pytest.fixture
def config(chart):
    """The chart's configuration of a router."""
    return routers.configuration(chart["ConfigMap"])


@pytest.fixture
def model(config):
    return config["models"][0]["name"]


@pytest.fixture
def fleet(control_plane, model, folder):
    fleet = Fleet(control_plane, BINARY, model, folder / "engines")
    yield fleet
    fleet.close()


@pytest.fixture
def account(control_plane, chart, folder):
    """The files of the service account that the chart makes."""
    return AccountFiles(control_plane, chart["ServiceAccount"]["metadata"]["name"], folder / "account")


@pytest.fixture
def user(chart):
    """The name of this account among users."""
    return f"system:serviceaccount:{NAMESPACE}:{chart['ServiceAccount']['metadata']['name']}"


@pytest.fixture
def start_router(control_plane, account, config, folder):
    """Starts a router in a pod: `with start_router() as router`."""
    return lambda: routers.running(BINARY, config, account, control_plane.port, folder)


@pytest.fixture
def pair(fleet):
    """Two prefill and two decode engines in ready pods."""
    for number in range(2):
        fleet.start(f"prefill-{number}", "prefill")
        fleet.start(f"decode-{number}", "decode")
    return ["decode-0", "decode-1", "prefill-0", "prefill-1"]


@pytest.fixture
def serving(start_router, pair, model):
    """A router that serves this fleet, with requests of which none may fail."""
    with start_router() as router:
        router.wait_for(*pair)
        with clients.running(router, model) as traffic:
            yield router, traffic


@pytest.fixture(autouse=True)
def no_watch_is_left(control_plane):
    """A router that has ended watches nothing."""
    yield
    eventually(control_plane.watches_of_pods, lambda now: now == 0, "no watch of pods is open")
