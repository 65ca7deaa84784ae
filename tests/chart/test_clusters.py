"""Values for clusters of other rules: quotas, registries, users, devices, classes of storage, names."""

from __future__ import annotations

from typing import Any

import helm_python
import pytest

from tests.chart.conftest import (
    BUILTIN,
    Objects,
    Render,
    container_of,
    merged,
    objects_in,
    pod_of,
    workloads,
)

SHARED = {"servers": {"release": "shared"}}  # its pods: the Job that forgets a run


def all_pods(render: Render, change: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Every kind of pod that a release has: services, servers, the run's Job, the hooks."""
    given = merged(BUILTIN, change)
    return {
        each["metadata"]["name"]: pod_of(each)
        for objects in (render("laptop-cpu", given), render("laptop-cpu", given, SHARED))
        for each in workloads(objects)
    }


def test_every_pod_is_placed_as_the_values_say(render: Render) -> None:
    given: dict[str, Any] = {
        "nodeSelector": {"pool": "team"},
        "tolerations": [{"key": "team", "operator": "Exists"}],
        "priorityClassName": "7",
        "schedulerName": "volcano",
    }
    pull = [{"name": "registry"}]
    pods = all_pods(render, {"defaults": given, "image": {"pullSecrets": pull}})
    assert {"demo-test", "demo-forget", "demo-nats"} <= pods.keys()
    for name, pod in pods.items():
        assert pod.items() >= given.items(), name
        assert pod["imagePullSecrets"] == pull, name


def test_every_container_asks_for_what_a_quota_counts(render: Render) -> None:
    """A ResourceQuota refuses pods of which one container does not say its share."""
    limits = {"cpu": "4", "memory": "2Gi", "ephemeral-storage": "4Gi"}
    ours = {"resources": {"limits": limits}}
    services = ("scheduler", "agents", "gateway", "reward", "sandbox", "weight_sync", "learner", "run",
                "autoscaling", "nats", "redis", "userCode")  # fmt: skip
    change: dict[str, Any] = {name: ours for name in services}
    change["inference"] = {"pools": {"default": ours}}
    for name, pod in all_pods(render, change).items():
        for container in [*pod["containers"], *pod.get("initContainers", [])]:
            assert container["resources"]["limits"] == limits, name
            assert container["resources"]["requests"].keys() >= {"cpu", "memory"}, name


def test_an_init_container_is_fetched_and_ends_as_the_others(render: Render) -> None:
    pods = all_pods(render, {"image": {"pullPolicy": "Always"}})
    (init,) = pods["demo-learner"]["initContainers"]
    assert init["imagePullPolicy"] == "Always"
    assert init["terminationMessagePolicy"] == "FallbackToLogsOnError"


def test_a_cluster_may_give_the_user(render: Render) -> None:
    """OpenShift refuses a pod that names a user outside of its namespace's range."""
    for name, pod in all_pods(render, {"defaults": {"runAsUser": None}}).items():
        assert pod["securityContext"] == {
            "runAsNonRoot": True,
            "seccompProfile": {"type": "RuntimeDefault"},
        }, name
    for name, pod in all_pods(render, {"defaults": {"runAsUser": 1000670000}}).items():
        context = pod["securityContext"]
        assert [context[key] for key in ("runAsUser", "runAsGroup", "fsGroup")] == [1000670000] * 3, (
            name
        )


@pytest.mark.parametrize("resource", ["amd.com/gpu", "nvidia.com/mig-3g.40gb", "gpu.intel.com/xe"])
def test_devices_have_the_name_of_their_plugin(resource: str, render: Render) -> None:
    gpus = {
        "experiment": {"inference": {"device": "cuda"}},
        "inference": {"pools": {"default": {"gpus": 1}, "usual": {"gpus": 1}}},
        "learner": {"gpus": 2},
    }

    def asked(*changes: dict[str, Any]) -> list[dict[str, int]]:
        objects = render("laptop-cpu", gpus, *changes)
        names = ("learner", "inference-default", "inference-usual")
        found = (container_of(objects["StatefulSet", f"demo-{name}"])["resources"] for name in names)
        return [
            {key: value for key, value in each["limits"].items() if "/" in key}
            for each in found
            if each["limits"].items() >= {k: v for k, v in each["requests"].items() if "/" in k}.items()
        ]

    assert asked({"defaults": {"gpuResource": resource}}) == [
        {resource: 2},
        {resource: 1},
        {resource: 1},
    ]
    usual = "nvidia.com/gpu"
    own = {"inference": {"pools": {"default": {"gpuResource": resource}}}}
    assert asked(own) == [{usual: 2}, {resource: 1}, {usual: 1}]


def test_every_claim_has_the_class_of_its_values(render: Render) -> None:
    def classes(name: str) -> list[str | None]:
        given: dict[str, Any] = {key: {"storageClass": name} for key in ("nats", "redis")}
        given["storage"] = {"runs": {"storageClass": name}}
        given["weight_sync"] = {"storageClass": name, "storage": "1Gi"}
        objects = render("laptop-cpu", given)
        claims = [each for (kind, _), each in objects.items() if kind == "PersistentVolumeClaim"]
        return [each["spec"].get("storageClassName") for each in claims]

    assert classes("7") == ["7"] * 4
    assert classes("") == [None] * 4
    assert classes("-") == [""] * 4, "no class: a volume that somebody made"


@pytest.mark.parametrize("namespace", ["no", "007", "1e3", "true"])
def test_a_namespace_may_look_like_another_type(
    namespace: str, chart: helm_python.Chart, values: dict[str, Any]
) -> None:
    def rendered(*changes: dict[str, Any]) -> Objects:
        given = merged(values["laptop-cpu"], BUILTIN, *changes)
        return objects_in(chart.render(given, name="demo", namespace=namespace))

    hpa = {"autoscaling": {"mode": "hpa"}}
    for objects in (rendered(), rendered(SHARED), rendered(hpa)):
        assert {each["metadata"]["namespace"] for each in objects.values()} == {namespace}
    (metric,) = rendered(hpa)["HorizontalPodAutoscaler", "demo-agents"]["spec"]["metrics"]
    assert metric["external"]["metric"]["selector"]["matchLabels"]["namespace"] == namespace


@pytest.mark.parametrize(
    ("runs", "told"),
    [
        ({"accessModes": ["ReadWriteOnce"]}, "must run on one node"),
        ({"accessModes": ["ReadWriteMany"]}, "storage.runs.storageClass"),
        ({"existingClaim": "mine"}, ""),
    ],
)
def test_a_volume_that_pods_may_wait_for_is_told(
    runs: dict[str, Any], told: str, chart: helm_python.Chart, values: dict[str, Any]
) -> None:
    given = merged(values["laptop-cpu"], {"storage": {"runs": runs}})
    manifests = chart.render(given, name="demo", namespace="team")
    notes = next(text for path, text in manifests.items() if path.endswith("NOTES.txt"))
    found = [line for line in ("must run on one node", "storage.runs.storageClass") if line in notes]
    assert found == ([told] if told else [])


def test_a_run_is_forgotten_once_its_slowest_pod_has_drained(render: Render) -> None:
    """A learner writes to the shared servers as long as it drains."""

    def deadline(*changes: dict[str, Any]) -> int:
        objects = render("laptop-cpu", SHARED, *changes)
        found: int = objects["Job", "demo-forget"]["spec"]["activeDeadlineSeconds"]
        return found

    assert deadline() == 240
    assert deadline({"experiment": {"learner": {"drain_s": 600}}}) > 600 + 120
    pool = {"inference": {"pools": {"wide": {"overrides": {"drain_s": 900}}}}}
    assert deadline(pool) > 900 + 120
