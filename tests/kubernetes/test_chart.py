"""What the chart makes is what a real API server accepts, with no field that it does not know."""

import os
import pathlib

import pytest
import yaml

from cluster import chart as charts
from cluster.control_plane import DEFINITIONS, NAMESPACE
from support.waiting import eventually

# Kinds of the Prometheus Operator, which deploy/helm/render checks.
FOREIGN = {"PodMonitor", "PrometheusRule"}
FILES = [*sorted(charts.GOLDEN.glob("*.yaml")), charts.DEPLOY / "kubernetes" / "splitrail.yaml"]


@pytest.fixture(scope="module")
def gateway_api(control_plane):
    """The API server knows HTTPRoutes."""
    file = pathlib.Path(os.environ["SPLITRAIL_KUBERNETES_SERVERS"]) / "httproutes.yaml"
    control_plane.create(DEFINITIONS, yaml.safe_load(file.read_text()))
    routes = f"/apis/gateway.networking.k8s.io/v1/namespaces/{NAMESPACE}/httproutes"
    eventually(lambda: control_plane.has(routes), bool, "HTTPRoutes are served")


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_the_api_server_accepts(control_plane, gateway_api, file):
    known = [resource for resource in charts.resources(file) if resource["kind"] not in FOREIGN]
    assert known
    for resource in known:
        name = f"dry-run-{resource['metadata']['name']}"
        resource["metadata"]["name"] = name
        control_plane.create_resource(resource, dryRun="All")
