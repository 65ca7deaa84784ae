"""A pool whose servers span nodes: a LeaderWorkerSet, and what else knows of it."""

from __future__ import annotations

from typing import Any

import kubernetes_validate
import pytest

from tests.chart.conftest import TWO_NODES, Objects, Render, container_of, experiment_of, merged

NAME = "demo-inference-default"
KEY = "LeaderWorkerSet", NAME
SCALED = {"experiment": {"autoscaler": {"targets": {"inference-default": {"max_replicas": 4}}}}}


@pytest.fixture(scope="module")
def objects(render: Render) -> Objects:
    return render("laptop-cpu", TWO_NODES)


def templates(found: dict[str, Any]) -> list[dict[str, Any]]:
    template = found["spec"]["leaderWorkerTemplate"]
    return [template["leaderTemplate"], template["workerTemplate"]]


def test_a_group_of_pods_is_one_server_and_starts_again_as_a_whole(objects: Objects) -> None:
    found = objects[KEY]
    assert found["apiVersion"] == "leaderworkerset.x-k8s.io/v1"
    assert ("StatefulSet", NAME) not in objects
    assert found["spec"]["replicas"] == 3
    template = found["spec"]["leaderWorkerTemplate"]
    assert template["size"] == 2
    assert template["restartPolicy"] == "RecreateGroupOnPodRestart"
    assert found["spec"]["startupPolicy"] == "LeaderCreated"


def test_its_pods_are_those_of_a_statefulset_and_know_their_group(render: Render) -> None:
    one = {"nodes": 1, "gpus": 8, "overrides": {"num_nodes": 1}}
    alone = render("laptop-cpu", merged(TWO_NODES, {"inference": {"pools": {"default": one}}}))
    expected = alone["StatefulSet", NAME]["spec"]["template"]
    leader, worker = templates(render("laptop-cpu", TWO_NODES)[KEY])
    assert leader == worker
    for pod in (leader, expected):
        version = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "x"} | pod["metadata"]}
        kubernetes_validate.validate(version | {"spec": pod["spec"]}, "1.34", strict=True)
    container, before = (container_of({"kind": "Pod", **each}) for each in (leader, expected))
    env = {each["name"]: each.get("value") for each in container.pop("env")}
    others = {each["name"]: each.get("value") for each in before.pop("env")}
    # The controller sets what these name, before all others.
    added = {
        "TAILRACE_NODE_RANK": "$(LWS_WORKER_INDEX)",
        "TAILRACE_MASTER": "$(LWS_LEADER_ADDRESS):29500",
    }
    assert env == others | added
    assert container.pop("ports") == [*before.pop("ports"), {"name": "nodes", "containerPort": 29500}]
    assert container.pop("resources")["limits"]["nvidia.com/gpu"] == 4
    assert before.pop("resources")["limits"]["nvidia.com/gpu"] == 8
    for each in (leader, expected):
        del each["metadata"]["annotations"]  # a digest of their keys, which differ
    assert leader == expected


def test_the_services_read_the_number_of_nodes(objects: Objects) -> None:
    found = experiment_of(objects, "demo-experiment-default")["inference"]
    assert (found["num_nodes"], found["tensor_parallel_size"], found["engine"]) == (2, 8, "vllm")


def test_the_services_name_is_the_controllers_and_ours_finds_leaders(objects: Objects) -> None:
    assert ("Service", NAME) not in objects
    found = objects["Service", f"{NAME}-leaders"]["spec"]
    labels = templates(objects[KEY])[0]["metadata"]["labels"]
    index = {"leaderworkerset.sigs.k8s.io/worker-index": "0"}
    assert found["selector"].items() - index.items() <= labels.items()
    assert index.items() <= found["selector"].items()
    assert [port["name"] for port in found["ports"]] == ["metrics"]


def test_a_groups_pods_reach_each_other_on_any_port(render: Render) -> None:
    without = {"experiment": {"weight_sync": {"relays": False}}}
    policy = render("laptop-cpu", TWO_NODES, without)["NetworkPolicy", NAME]["spec"]
    for rules, peers in ((policy["ingress"], "from"), (policy["egress"], "to")):
        found = [
            rule
            for rule in rules
            for peer in rule.get(peers, [])
            if peer.get("podSelector", {}).get("matchLabels", {}).get("app.kubernetes.io/component")
            == "inference-default"
        ]
        assert len(found) == 1
        assert "ports" not in found[0]


def test_the_disruption_budget_counts_its_pods(render: Render) -> None:
    budget = {"inference": {"pools": {"default": {"pdb": {"maxUnavailable": 1}}}}}
    objects = render("laptop-cpu", TWO_NODES, budget)
    selector = objects["PodDisruptionBudget", NAME]["spec"]["selector"]["matchLabels"]
    for template in templates(objects[KEY]):
        assert selector.items() <= template["metadata"]["labels"].items()


@pytest.mark.parametrize(
    ("mode", "kind"), [("keda", "ScaledObject"), ("hpa", "HorizontalPodAutoscaler")]
)
def test_scalers_count_groups(mode: str, kind: str, render: Render) -> None:
    scaling = {"autoscaling": {"enabled": True, "mode": mode, "prometheusUrl": "http://p"}}
    objects = render("laptop-cpu", TWO_NODES, SCALED, scaling)
    assert "replicas" not in objects[KEY]["spec"]
    target = objects[kind, NAME]["spec"]["scaleTargetRef"]
    assert target == {
        "apiVersion": "leaderworkerset.x-k8s.io/v1", "kind": "LeaderWorkerSet", "name": NAME,
    }  # fmt: skip


def test_the_builtin_scaler_and_the_runs_end_may_set_its_scale_alone(render: Render) -> None:
    scaling = {"autoscaling": {"enabled": True, "mode": "builtin"}}
    objects = render("laptop-cpu", TWO_NODES, SCALED, scaling)
    expected = {
        "apiGroups": ["leaderworkerset.x-k8s.io"],
        "resources": ["leaderworkersets/scale"],
        "resourceNames": [NAME],
        "verbs": ["get", "patch"],
    }
    assert objects["Role", "demo-autoscaler"]["rules"] == [expected]
    assert expected in objects["Role", "demo-run"]["rules"]
    (job,) = [each for (kind, name), each in objects.items() if kind == "Job" and "-run-" in name]
    assert f"LeaderWorkerSet/{NAME}" in container_of(job)["args"]
    target = experiment_of(objects)["autoscaler"]["targets"]["inference-default"]
    assert (target["kind"], target["name"]) == KEY
