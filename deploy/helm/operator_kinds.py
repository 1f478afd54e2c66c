"""Checks the PodMonitors and PrometheusRules of rendered files against the operator's schemas.

`deploy/helm/render` runs it. An unknown key is an error here, as it is to `kubectl apply`.
"""

import copy
import pathlib
import sys

import yaml
from cloudcoil.models.prometheus_operator import v1
from pydantic import ValidationError

KINDS = {"PodMonitor": v1.PodMonitor, "PrometheusRule": v1.PrometheusRule}
GROUP = "monitoring.coreos.com/v1"


def problem(resource: dict) -> str | None:
    """What is wrong with a resource; nothing if it is valid."""
    model = KINDS.get(resource["kind"])
    if model is None or resource["apiVersion"] != GROUP:
        return f"{resource['apiVersion']} has no kind {resource['kind']}"
    try:
        known = model.model_validate(resource).model_dump(mode="json", by_alias=True, exclude_unset=True)
    except ValidationError as error:
        return str(error)
    return unknown(resource, known, "")


def unknown(written: object, known: object, path: str) -> str | None:
    """The first key that the schema does not know: the schema's model leaves it out."""
    if isinstance(written, dict) and isinstance(known, dict):
        pairs = [(f"{path}.{key}", value, known.get(key)) for key, value in written.items()]
    elif isinstance(written, list) and isinstance(known, list) and len(written) == len(known):
        pairs = [(f"{path}[{at}]", *both) for at, both in enumerate(zip(written, known, strict=True))]
    else:
        return None if written == known else f"{path} is unknown"
    return next(filter(None, (unknown(one, other, at) for at, one, other in pairs)), None)


def refuses_mistakes(monitor: dict) -> bool:
    """A check is worth something only if it refuses what is wrong."""
    for change in ({"podMetricsEndpoint": []}, {"selector": None}, {"podMetricsEndpoints": [{"interval": "5 s"}]}):
        wrong = copy.deepcopy(monitor)
        wrong["spec"].update(change)
        if problem(wrong) is None:
            print(f"the schema of PodMonitor accepts {change}", file=sys.stderr)
            return False
    return True


def main(files: list[str]) -> int:
    resources = [
        (file, resource)
        for file in files
        for resource in yaml.safe_load_all(pathlib.Path(file).read_text())
        if resource and resource["apiVersion"].startswith("monitoring.coreos.com/")
    ]
    status = 0
    for file, resource in resources:
        if wrong := problem(resource):
            print(f"{file}: {resource['kind']} {resource['metadata']['name']}: {wrong}", file=sys.stderr)
            status = 1
    kinds = {resource["kind"] for _, resource in resources}
    if kinds != set(KINDS):
        print(f"no file has all of {', '.join(KINDS)}: {kinds}", file=sys.stderr)
        return 1
    monitor = next(resource for _, resource in resources if resource["kind"] == "PodMonitor")
    if not refuses_mistakes(monitor):
        return 1
    if status == 0:
        print(f"{len(resources)} resources are valid for the Prometheus Operator")
    return status


sys.exit(main(sys.argv[1:]))
