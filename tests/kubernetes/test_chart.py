"""What the chart makes is what a real API server accepts, with no field that it does not know."""

import pytest

from cluster import chart as charts

# Kinds of the Prometheus Operator, which deploy/helm/render checks.
FOREIGN = {"PodMonitor", "PrometheusRule"}
FILES = [*sorted(charts.GOLDEN.glob("*.yaml")), charts.DEPLOY / "kubernetes" / "splitrail.yaml"]


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_the_api_server_accepts(control_plane, file):
    known = [resource for resource in charts.resources(file) if resource["kind"] not in FOREIGN]
    assert known
    for resource in known:
        name = f"dry-run-{resource['metadata']['name']}"
        resource["metadata"]["name"] = name
        control_plane.create_resource(resource, dryRun="All")
