"""Scaling, the end of a run, helm test, monitoring."""

from __future__ import annotations

import json
import re
from typing import Any

import helm_python
import pytest

from tailrace.tracing import SALT_VARIABLE
from tailrace_cli.cluster.permissions import SERVICE_USERS
from tailrace_inference.metrics import COUNTERS, GAUGES
from tests.chart.conftest import (
    CHART,
    ROOT,
    SEED,
    Render,
    container_of,
    experiment_of,
    merged,
    objects_in,
    workloads,
)

# Scaling


@pytest.mark.parametrize("mode", ["metric", "keda", "hpa", "builtin"])
def test_replicas_have_one_owner(mode: str, render: Render) -> None:
    targets = {"agents": {"max_replicas": 4}, "inference-default": {"max_replicas": 2}}
    scaling = {"enabled": True, "mode": mode, "prometheusUrl": "http://p"}
    objects = render(
        "laptop-cpu", {"autoscaling": scaling, "experiment": {"autoscaler": {"targets": targets}}}
    )
    owned = mode == "metric"
    for key in (("Deployment", "demo-agents"), ("StatefulSet", "demo-inference-default")):
        assert ("replicas" in objects[key]["spec"]) is owned
    assert "replicas" in objects["Deployment", "demo-reward"]["spec"]
    scalers = [kind for kind, _ in objects if kind in ("ScaledObject", "HorizontalPodAutoscaler")]
    assert scalers == {"keda": ["ScaledObject"] * 2, "hpa": ["HorizontalPodAutoscaler"] * 2}.get(
        mode, []
    )
    assert (("Role", "demo-autoscaler") in objects) is (mode == "builtin")
    found = experiment_of(objects)["autoscaler"]
    assert found["mode"] == mode
    assert found["targets"]["agents"] == {
        "kind": "Deployment",
        "name": "demo-agents",
        "max_replicas": 4,
    }


def test_keda_reads_the_work_queue_and_the_exported_number(render: Render) -> None:
    scaling = {"enabled": True, "mode": "keda", "prometheusUrl": "http://prometheus:9090"}
    change = {
        "autoscaling": scaling,
        "experiment": {"autoscaler": {"targets": {"agents": {"max_replicas": 9}}}},
    }
    spec = render("laptop-cpu", change)["ScaledObject", "demo-agents"]["spec"]
    queue, prometheus = spec["triggers"]
    assert queue["metadata"]["stream"] == "demo_EPISODES"
    assert queue["metadata"]["natsServerMonitoringEndpoint"] == "demo-nats.team:8222"
    assert prometheus["metadata"]["ignoreNullValues"] == "false"
    assert 'target="agents"' in prometheus["metadata"]["query"]
    assert spec["maxReplicaCount"] == 9


def test_keda_may_scale_to_none_and_asks_no_server_that_is_brought(render: Render) -> None:
    targets = {"agents": {"min_replicas": 0, "max_replicas": 9}}
    change = {
        "nats": {"external": {"url": "nats://elsewhere:4222"}},
        "experiment": {"autoscaler": {"targets": targets}},
    }
    keda = {"autoscaling": {"enabled": True, "mode": "keda", "prometheusUrl": "http://p"}}
    spec = render("laptop-cpu", change, keda)["ScaledObject", "demo-agents"]["spec"]
    assert spec["minReplicaCount"] == 0
    assert [trigger["type"] for trigger in spec["triggers"]] == ["prometheus"]
    hpa = render("laptop-cpu", change, {"autoscaling": {"enabled": True, "mode": "hpa"}})
    assert hpa["HorizontalPodAutoscaler", "demo-agents"]["spec"]["minReplicas"] == 1


def test_keda_reaches_the_monitor_of_nats_and_nobody_else_does(render: Render) -> None:
    scaling = {"enabled": True, "mode": "keda", "prometheusUrl": "http://prometheus:9090"}

    def monitor_rules(mode: str) -> list[dict[str, Any]]:
        bounds = {"autoscaler": {"targets": {"agents": {"max_replicas": 9}}}}
        objects = render("laptop-cpu", {"autoscaling": scaling | {"mode": mode}, "experiment": bounds})
        rules = objects["NetworkPolicy", "demo-nats"]["spec"]["ingress"]
        return [each["from"] for each in rules if each.get("ports") == [{"port": "monitor"}]]

    operator = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "keda"}}}
    assert monitor_rules("keda") == [[operator]]
    assert monitor_rules("metric") == []


def test_without_autoscaling_nothing_of_it_is_there(render: Render) -> None:
    assert not [key for key in render() if "autoscaler" in key[1] and key[0] != "Secret"]


# Run and test


def test_the_run_ends_and_takes_all_workloads_with_it(everything: Any) -> None:
    (job,) = [each for (kind, _), each in everything.items() if kind == "Job"]
    args = container_of(job)["args"]
    stopped = set(args[args.index("--then-stop") + 1 :]) - {"-"}
    running = {f"{kind}/{name}" for kind, name in everything if kind in ("Deployment", "StatefulSet")}
    assert stopped == running
    order = args[args.index("--then-stop") + 1 :]
    assert order[:2] == ["Deployment/demo-autoscaler", "-"], "else it sets replicas again"
    assert order.index("StatefulSet/demo-learner") < order.index("-", 2)
    assert order.index("-", 2) < order.index("StatefulSet/demo-nats")
    (rule,) = job["spec"]["podFailurePolicy"]["rules"]
    assert rule["action"] == "FailJob"
    assert rule["onExitCodes"]["values"] == [1, 2]


def test_the_run_ends_what_keda_scales_before_it_stops_it(render: Render) -> None:
    """KEDA starts a workload without replicas as long as its triggers are active."""
    bounds = {"autoscaler": {"targets": {"agents": {"max_replicas": 9}}}}
    scaling = {"enabled": True, "mode": "keda", "prometheusUrl": "http://prometheus:9090"}
    objects = render("laptop-cpu", {"autoscaling": scaling, "experiment": bounds})
    (job,) = [each for (kind, _), each in objects.items() if kind == "Job"]
    args = container_of(job)["args"]
    assert args[args.index("--then-stop") + 1] == "ScaledObject/demo-agents"
    assert {
        "apiGroups": ["keda.sh"],
        "resources": ["scaledobjects"],
        "resourceNames": ["demo-agents"],
        "verbs": ["delete"],
    } in objects["Role", "demo-run"]["rules"]


def test_a_changed_run_is_another_job(render: Render) -> None:
    def name(*changes: dict[str, Any]) -> str:
        (found,) = [name for kind, name in render("laptop-cpu", *changes) if kind == "Job"]
        return found

    assert name() == name()
    assert name() != name({"experiment": {"max_steps": 9}})


def test_helm_test_plays_one_episode(render: Render) -> None:
    pod = render()["Pod", "demo-test"]
    assert pod["metadata"]["annotations"]["helm.sh/hook"] == "test"
    assert container_of(pod)["args"][-2:] == ["--until", "episode"]


def test_helm_test_leaves_no_pod_when_it_fails(render: Render) -> None:
    annotations = render()["Pod", "demo-test"]["metadata"]["annotations"]
    policies = {"before-hook-creation", "hook-succeeded", "hook-failed"}
    assert set(annotations["helm.sh/hook-delete-policy"].split(",")) == policies
    assert annotations["helm.sh/hook-output-log-policy"] == "hook-failed"


# Monitoring


def test_monitoring_finds_every_service(everything: Any) -> None:
    monitor = everything["PodMonitor", "demo-services"]["spec"]
    assert monitor["podMetricsEndpoints"][0]["port"] == "metrics"
    labels = everything["Deployment", "demo-agents"]["spec"]["template"]["metadata"]["labels"]
    assert monitor["selector"]["matchLabels"].items() <= labels.items()


def test_a_pod_has_the_service_label_of_a_local_run(everything: Any) -> None:
    (endpoint,) = everything["PodMonitor", "demo-services"]["spec"]["podMetricsEndpoints"]

    def service(component: str) -> str:
        found = ""
        for rule in endpoint["relabelings"]:
            if rule["targetLabel"] == "service" and re.fullmatch(rule.get("regex", ".*"), component):
                found = rule.get("replacement", component)
        return found

    components = {
        each["spec"]["template"]["metadata"]["labels"]["app.kubernetes.io/component"]
        for (kind, _), each in everything.items()
        if kind in ("Deployment", "StatefulSet")
    }
    assert {"inference-default", "weight-sync"} <= components
    assert {service(each) for each in components - {"nats", "redis"}} <= set(SERVICE_USERS)


@pytest.mark.parametrize("key", ["gatewayFrom", "metricsFrom"])
def test_a_way_that_the_policies_close_is_told(
    key: str, chart: helm_python.Chart, values: dict[str, dict[str, Any]]
) -> None:
    asked = {
        "gateway": {"enabled": True, "ingress": {"enabled": True, "host": "x.example.org"}},
        "monitoring": {"podMonitor": True},
    }

    def notes(policy: dict[str, Any]) -> str:
        given = merged(values["laptop-cpu"], SEED, asked, {"networkPolicy": policy})
        manifests = chart.render(given, name="demo", namespace="team")
        return next(text for path, text in manifests.items() if path.endswith("NOTES.txt"))

    assert f"networkPolicy.{key}" in notes({})
    assert f"networkPolicy.{key}" not in notes({key: [{"podSelector": {}}]})
    assert f"networkPolicy.{key}" not in notes({"enabled": False})


def test_dashboards_are_config_maps_that_grafana_finds(everything: Any) -> None:
    found = [
        each for (kind, name), each in everything.items() if kind == "ConfigMap" and "dashboard" in name
    ]
    assert found
    for each in found:
        assert each["metadata"]["labels"]["grafana_dashboard"] == "1"
        for content in each["data"].values():
            assert json.loads(content)["panels"]


def test_runs_with_one_name_have_different_traces(
    chart: helm_python.Chart, values: dict[str, dict[str, Any]]
) -> None:
    def salts(name: str, namespace: str) -> set[str]:
        objects = objects_in(chart.render(values["laptop-cpu"], name=name, namespace=namespace))
        environments = [
            {variable["name"]: variable.get("value") for variable in container_of(each)["env"]}
            for each in workloads(objects)
            if each["metadata"]["name"].removeprefix(f"{name}-") not in ("nats", "redis")
        ]
        return {environment[SALT_VARIABLE] for environment in environments}

    found = [salts("demo", "one"), salts("demo", "two"), salts("other", "one")]
    assert [len(each) for each in found] == [1, 1, 1]
    assert len(set.union(*found)) == 3


def test_alerts_are_rules_of_the_prometheus_operator(everything: Any) -> None:
    rule = everything["PrometheusRule", "demo-alerts"]
    alerts = [each["alert"] for group in rule["spec"]["groups"] for each in group["rules"]]
    assert {"TailraceNoProgress", "TailraceDiskLow", "TailraceDrift"} <= set(alerts)


def test_dashboards_and_alerts_ask_for_metrics_that_the_code_has() -> None:
    code = "\n".join(
        path.read_text() for folder in ("shared", "services") for path in (ROOT / folder).rglob("*.py")
    )
    names = set(re.findall(r'"(tailrace_[a-z0-9_]+)"', code))
    names |= {
        f"tailrace_inference_{name}" for name in (*GAUGES, *(name for name, _ in COUNTERS.values()))
    }
    for path in (*(CHART / "files" / "dashboards").glob("*.json"), CHART / "files" / "alerts.yaml"):
        for name in re.findall(r"(tailrace_[a-z0-9_]+)[\[{)]", path.read_text()):
            assert re.sub(r"_(total|bucket|count|sum)$", "", name) in names, f"{path.name}: {name}"
