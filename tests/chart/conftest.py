"""The chart, rendered by the Helm SDK; no cluster."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import helm_python
import pytest
import yaml

ROOT = Path(__file__).parents[2]
CHART = ROOT / "helm" / "tailrace"
VALUES_FILES = sorted((CHART / "values").glob("*.yaml"))
SEED = {"credentials": {"seed": "test"}}  # the passwords do not change from one rendering to the next

Objects = dict[tuple[str, str], dict[str, Any]]


def merged(base: dict[str, Any], *changes: dict[str, Any]) -> dict[str, Any]:
    """`base` with the changes in it, dicts merged, as Helm merges values."""
    result = copy.deepcopy(base)
    for change in changes:
        for key, value in change.items():
            is_both = isinstance(value, dict) and isinstance(result.get(key), dict)
            result[key] = merged(result[key], value) if is_both else copy.deepcopy(value)
    return result


def objects_in(manifests: dict[str, str]) -> Objects:
    """Rendered objects by kind and name; a name that stands twice fails."""
    found: Objects = {}
    for path, text in manifests.items():
        if path.endswith("NOTES.txt"):
            continue
        for each in yaml.safe_load_all(text):
            if each:
                key = each["kind"], each["metadata"]["name"]
                assert key not in found, f"{key} is rendered twice"
                found[key] = each
    return found


Render = Callable[..., Objects]


@pytest.fixture(scope="session")
def chart() -> helm_python.Chart:
    with helm_python.Chart.load(CHART) as loaded:
        yield loaded


@pytest.fixture(scope="session")
def values() -> dict[str, dict[str, Any]]:
    """Content of the values files by name."""
    return {path.stem: yaml.safe_load(path.read_text()) for path in VALUES_FILES}


@pytest.fixture(scope="session")
def render(chart: helm_python.Chart, values: dict[str, dict[str, Any]]) -> Render:
    """Renders a values file with changes, as release `demo` in namespace `team`."""

    def rendered(name: str = "laptop-cpu", *changes: dict[str, Any]) -> Objects:
        given = merged(values[name], SEED, *changes)
        return objects_in(chart.render(given, name="demo", namespace="team"))

    return rendered


def pod_of(found: dict[str, Any]) -> dict[str, Any]:
    """Pod spec of a workload."""
    return found["spec"] if found["kind"] == "Pod" else found["spec"]["template"]["spec"]


def container_of(found: dict[str, Any]) -> dict[str, Any]:
    """The one container of a workload."""
    (container,) = pod_of(found)["containers"]
    return container


def experiment_of(objects: Objects, name: str = "demo-experiment") -> dict[str, Any]:
    """The experiment that the services read."""
    return json.loads(objects["ConfigMap", name]["data"]["experiment.json"])


WORKLOADS = ("Deployment", "StatefulSet", "Job", "Pod")


def workloads(objects: Objects) -> list[dict[str, Any]]:
    """All objects with pods."""
    return [each for (kind, _), each in objects.items() if kind in WORKLOADS]


EVERYTHING = {
    "gateway": {
        "enabled": True,
        "ingress": {"enabled": True, "host": "x.example.org", "tlsSecret": "t"},
    },
    "sandbox": {"replicas": 1, "runtimeClassName": "gvisor"},
    "tls": {"enabled": True},
    "userCode": {"git": {"url": "https://example.org/code.git", "image": "git:1"}},
    "telemetry": {"otlpEndpoint": "http://otel:4317"},
    "weight_sync": {"storage": "10Gi"},
    "monitoring": {"dashboards": True, "podMonitor": True, "rules": True},
    "experiment": {"autoscaler": {"targets": {"agents": {"max_replicas": 4}}}},
}
SERVICES = ("scheduler", "agents", "gateway", "reward", "sandbox", "weight-sync", "autoscaler")
BUILTIN = merged(EVERYTHING, {"autoscaling": {"enabled": True, "mode": "builtin"}})


@pytest.fixture(scope="module")
def everything(render: Render) -> Objects:
    """All that the chart can render at once."""
    return render("laptop-cpu", BUILTIN)


# A server on two nodes with 4 GPUs each.
TWO_NODES = {
    "inference": {
        "pools": {
            "default": {
                "image": "inference-vllm",
                "replicas": 3,
                "nodes": 2,
                "gpus": 4,
                "overrides": {
                    "engine": "vllm",
                    "device": "cuda",
                    "num_nodes": 2,
                    "tensor_parallel_size": 8,
                },
            }
        }
    }
}
