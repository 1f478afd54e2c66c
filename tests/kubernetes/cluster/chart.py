"""What the chart makes, as it is kept beside the chart."""

import pathlib

import yaml

DEPLOY = pathlib.Path(__file__).parents[3] / "deploy"
GOLDEN = DEPLOY / "helm" / "golden"


def resources(file):
    return [resource for resource in yaml.safe_load_all(file.read_text()) if resource]


def by_kind(name):
    """The resources of a release whose kinds differ."""
    return {resource["kind"]: resource for resource in resources(GOLDEN / f"{name}.yaml")}
