"""What pods may do, whom they reach, and under which certificates."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.chart.conftest import (
    Objects,
    Render,
    container_of,
    pod_of,
    workloads,
)

# Security


def test_every_pod_is_restricted(everything: Any) -> None:
    for each in workloads(everything):
        pod, name = pod_of(each), each["metadata"]["name"]
        assert pod["securityContext"]["runAsNonRoot"] is True, name
        assert pod["securityContext"]["runAsUser"] == 65532, name
        assert pod["securityContext"]["seccompProfile"]["type"] == "RuntimeDefault", name
        assert not pod.get("hostNetwork")
        assert not pod.get("hostPID")
        for container in [*pod["containers"], *pod.get("initContainers", [])]:
            context = container["securityContext"]
            assert context["allowPrivilegeEscalation"] is False, name
            assert context["readOnlyRootFilesystem"] is True, name
            assert context["capabilities"] == {"drop": ["ALL"]}, name


def test_no_volume_is_of_the_host(everything: Any) -> None:
    for each in workloads(everything):
        assert not [volume for volume in pod_of(each)["volumes"] if "hostPath" in volume]


def test_each_pod_has_an_account_of_its_own(everything: Any) -> None:
    accounts = {pod_of(each)["serviceAccountName"] for each in workloads(everything)}
    assert accounts <= {name for kind, name in everything if kind == "ServiceAccount"}
    assert len(accounts) == len(workloads(everything)) - 1  # the test shares the run's


def test_only_run_and_autoscaler_get_a_token(everything: Any) -> None:
    with_token = {
        each["metadata"]["name"].removeprefix("demo-").split("-")[0]
        for each in workloads(everything)
        if pod_of(each)["automountServiceAccountToken"]
    }
    assert with_token == {"run", "autoscaler"}


def test_the_roles_may_scale_named_workloads_and_nothing_else(everything: Any) -> None:
    names = {each["metadata"]["name"] for each in workloads(everything)}
    roles = [each for (kind, _), each in everything.items() if kind == "Role"]
    assert len(roles) == 2
    for role in roles:
        for rule in role["rules"]:
            assert set(rule["resources"]) <= {"deployments/scale", "statefulsets/scale"}
            assert rule["verbs"] == ["get", "patch"]
            assert rule["resourceNames"]
            assert set(rule["resourceNames"]) <= names
    assert not [kind for kind, _ in everything if kind.startswith("Cluster")]


def test_a_pod_sees_its_own_password_alone(everything: Any) -> None:
    for each in workloads(everything):
        volumes = pod_of(each)["volumes"]
        found = [volume["secret"]["secretName"] for volume in volumes if "secret" in volume]
        own = [
            name for name in found if name not in ("demo-tls", "demo-nats-config", "demo-redis-config")
        ]
        assert len(own) == (0 if each["metadata"]["name"] in ("demo-nats", "demo-redis") else 1)
        user = next(
            (e for e in container_of(each).get("env", ()) if e["name"] == "TAILRACE_NATS_USER"), None
        )
        assert user is None or own == [f"demo-{user['value'].replace('_', '-')}"]


def test_no_password_is_in_an_environment(everything: Any) -> None:
    for each in workloads(everything):
        for variable in container_of(each).get("env", ()):
            if "PASSWORD" in variable["name"]:
                assert variable["name"].endswith("_FILE")


# Network


def peers(policy: dict[str, Any], direction: str, which: str) -> set[str]:
    return {
        peer["podSelector"]["matchLabels"].get("app.kubernetes.io/component", "*")
        for rule in policy["spec"].get(direction) or ()
        for peer in rule.get(which, ())
        if "podSelector" in peer
    }


def test_the_sandbox_reaches_the_servers_only(everything: Any) -> None:
    policy = everything["NetworkPolicy", "demo-sandbox"]
    assert peers(policy, "egress", "to") == {"nats", "redis"}
    assert peers(policy, "ingress", "from") == set()
    for rule in policy["spec"]["egress"]:
        assert rule.get("to"), "a rule without peers would be the whole world"


def test_every_pod_has_a_policy_for_both_directions(everything: Any) -> None:
    policies = [each for (kind, _), each in everything.items() if kind == "NetworkPolicy"]
    components = set()
    for each in policies:
        assert each["spec"]["policyTypes"] == ["Ingress", "Egress"]
        selector = each["spec"]["podSelector"]
        components.add(selector["matchLabels"].get("app.kubernetes.io/component", "run"))
    for each in workloads(everything):
        labels = (
            each["metadata"]["labels"]
            if each["kind"] == "Pod"
            else each["spec"]["template"]["metadata"]["labels"]
        )
        component = labels["app.kubernetes.io/component"]
        assert component in components or component == "test"


def test_weights_and_tokens_have_their_ways(everything: Any) -> None:
    assert peers(everything["NetworkPolicy", "demo-inference-default"], "ingress", "from") == {
        "agents",
        "gateway",
        "inference-default",  # relays of weights
    }
    assert peers(everything["NetworkPolicy", "demo-weight-sync"], "ingress", "from") == {
        "inference-default"
    }
    assert peers(everything["NetworkPolicy", "demo-learner"], "ingress", "from") == {
        "weight-sync",
        "learner",
    }
    assert "weight-sync" in peers(everything["NetworkPolicy", "demo-inference-default"], "egress", "to")


POOLS = {"inference": {"pools": {"second": {"replicas": 1, "image": "inference-torch"}}}}


@pytest.mark.parametrize(
    ("weight_sync", "from_servers", "from_weight_sync"),
    [
        ({}, True, False),
        ({"relays": False}, False, False),
        ({"transport": "broadcast"}, True, True),
        ({"transport": "broadcast", "relays": False}, True, True),
    ],
    ids=str,
)
def test_relays_and_broadcasts_open_the_ways_that_they_need_and_no_others(
    render: Render, weight_sync: dict[str, Any], from_servers: bool, from_weight_sync: bool
) -> None:
    objects = render("laptop-cpu", POOLS, {"experiment": {"weight_sync": weight_sync}})
    pools = {"inference-default", "inference-second"}
    for pool in pools:
        policy = objects["NetworkPolicy", f"demo-{pool}"]
        callers, called = peers(policy, "ingress", "from"), peers(policy, "egress", "to")
        assert callers & pools == called & pools == (pools if from_servers else set())
        assert ("weight-sync" in callers) == from_weight_sync
        assert "weight-sync" in called
        for rule in [*policy["spec"]["ingress"], *policy["spec"]["egress"]]:
            met = json.dumps(rule)
            if "inference-" in met or "weight-sync" in met:
                assert "ports" not in rule, "weights travel over free ports"
    policy = objects["NetworkPolicy", "demo-weight-sync"]
    assert peers(policy, "ingress", "from") == pools
    assert (peers(policy, "egress", "to") & pools == pools) == from_weight_sync


def test_reward_workers_have_no_way_to_redis(everything: Any) -> None:
    assert peers(everything["NetworkPolicy", "demo-reward"], "egress", "to") == {"nats", "gateway"}


def test_services_meet_only_pods_of_their_release(everything: Any) -> None:
    for (kind, name), each in everything.items():
        if kind == "NetworkPolicy":
            text = json.dumps(each["spec"])
            assert text.count('"app.kubernetes.io/name": "tailrace"') == text.count(
                '"app.kubernetes.io/instance": "demo"'
            ), name


def test_policies_can_be_left_to_others(render: Render) -> None:
    objects = render("laptop-cpu", {"networkPolicy": {"enabled": False}})
    assert not [name for kind, name in objects if kind == "NetworkPolicy"]


# TLS


def test_tls_reaches_servers_and_services(everything: Any) -> None:
    env = {
        each["name"]: each.get("value")
        for each in container_of(everything["Deployment", "demo-agents"])["env"]
    }
    assert env["TAILRACE_NATS_URL"] == "tls://demo-nats:4222"
    assert env["TAILRACE_REDIS_URL"] == "rediss://demo-redis:6379/0"
    assert env["TAILRACE_CA_FILE"] == "/etc/tailrace-tls/ca.crt"
    volumes = {
        each["name"]: each for each in pod_of(everything["Deployment", "demo-agents"])["volumes"]
    }
    assert [item["key"] for item in volumes["tls"]["secret"]["items"]] == ["ca.crt"], (
        "no key for services"
    )
    config = json.loads(everything["Secret", "demo-nats-config"]["stringData"]["nats.conf"])
    assert config["tls"]["cert_file"] == "/etc/tls/tls.crt"
    assert "\nport 0\n" in everything["Secret", "demo-redis-config"]["stringData"]["redis.conf"]


def ports_of(objects: Objects, part: str) -> set[int]:
    """Numbers of the ports that a part may call at any address."""
    rules = objects["NetworkPolicy", f"demo-{part}"]["spec"]["egress"]
    return {port["port"] for rule in rules if "to" not in rule for port in rule["ports"]}


def test_services_reach_the_receivers_of_their_traces(render: Render) -> None:
    run = {"tracing": {"endpoint": "https://trace.example.org/otel", "mlflow": "http://mlflow:5000"}}
    objects = render("laptop-cpu", {"experiment": run})
    assert ports_of(objects, "scheduler") >= {443}
    assert ports_of(objects, "agents") >= {443, 5000}
    assert 5000 not in ports_of(objects, "scheduler")
    given = {"telemetry": {"otlpEndpoint": "http://collector/v1/traces"}, "sandbox": {"replicas": 1}}
    objects = render("laptop-cpu", given)
    assert ports_of(objects, "scheduler") == {80, 4317, 4318}  # those behind a Service are its pods'
    assert not ports_of(objects, "sandbox")
    objects = render("laptop-cpu", {"telemetry": {"otlpEndpoint": "http://otel:4318"}})
    assert ports_of(objects, "scheduler") == {4317, 4318}
    assert not ports_of(render(), "scheduler")
