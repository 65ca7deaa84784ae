"""Values that clusters and operators bring: odd names, nulls, ports, budgets, modules from git."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import helm_python
import pytest

from tests.chart.conftest import (
    SEED,
    Render,
    container_of,
    experiment_of,
    merged,
    objects_in,
    pod_of,
    workloads,
)


def egress_ports(objects: Any, part: str) -> set[Any]:
    """Ports that a part may reach at any address."""
    rules = objects["NetworkPolicy", f"demo-{part}"]["spec"]["egress"]
    return {port["port"] for rule in rules if "to" not in rule for port in rule["ports"]}


# Names


@pytest.mark.parametrize("name", ["7b", "my.run"])
def test_a_release_whose_name_no_service_may_have_is_refused(
    name: str, chart: helm_python.Chart, values: dict[str, Any]
) -> None:
    with pytest.raises(helm_python.HelmError, match=f"the release's name {name}"):
        chart.render(values["laptop-cpu"], name=name, namespace="team")


# Pools and nulls


def test_a_pool_that_a_later_file_sets_to_null_is_none(render: Render) -> None:
    first = {"inference": {"pools": {"wide": {"replicas": 2}}}}
    assert ("StatefulSet", "demo-inference-wide") in render("laptop-cpu", first)
    objects = render("laptop-cpu", first, {"inference": {"pools": {"wide": None}}})
    assert not [name for _, name in objects if "inference-wide" in name]


def test_every_pool_has_the_defaults_of_the_first(render: Render) -> None:
    objects = render("laptop-cpu", {"inference": {"pools": {"wide": {}, "bare": {"pdb": None}}}})
    wide = container_of(objects["StatefulSet", "demo-inference-wide"])
    assert wide["resources"] == {
        "requests": {"cpu": "1", "memory": "2Gi"},
        "limits": {"memory": "8Gi"},
    }
    assert objects["PodDisruptionBudget", "demo-inference-wide"]["spec"]["maxUnavailable"] == 1
    assert ("PodDisruptionBudget", "demo-inference-bare") not in objects


@pytest.mark.parametrize(
    ("section", "key"),
    [("gateway", "ingress"), ("nats", "external"), ("userCode", "git"), ("storage", "objectStore")],
)
def test_a_section_that_is_null_is_refused_by_name(section: str, key: str, render: Render) -> None:
    with pytest.raises(helm_python.HelmError, match=f"/{section}.: missing property .{key}"):
        render("laptop-cpu", {section: {key: None}})


@pytest.mark.parametrize(
    ("section", "key"),
    [
        ("defaults", "podLabels"),
        ("defaults", "podAnnotations"),
        ("defaults", "env"),
        ("image", "digests"),
        ("networkPolicy", "extraEgress"),
    ],
)
def test_a_collection_that_is_null_is_empty(section: str, key: str, render: Render) -> None:
    assert render("laptop-cpu", {section: {key: None}}) == render()


# Pods


def test_a_budget_has_one_bound(render: Render) -> None:
    """Kubernetes refuses a PodDisruptionBudget with both."""
    spec = render("node-8gpu", {"agents": {"pdb": {"minAvailable": 3}}})[
        "PodDisruptionBudget", "demo-agents"
    ]["spec"]
    assert spec["minAvailable"] == 3
    assert "maxUnavailable" not in spec


def test_a_variable_stands_once_and_the_service_wins(render: Render) -> None:
    """Server-side apply, which Helm 4 uses, refuses a list with a name twice."""
    change = {
        "defaults": {"env": [{"name": "HF_HUB_OFFLINE", "value": "0"}, {"name": "A", "value": "1"}]},
        "agents": {"env": [{"name": "A", "value": "2"}]},
    }
    for each in workloads(objects := render("laptop-cpu", change)):
        names = [variable["name"] for variable in container_of(each).get("env", [])]
        assert len(set(names)) == len(names), each["metadata"]["name"]

    def value(part: str, name: str) -> str:
        env = container_of(objects["Deployment", part])["env"]
        return {each["name"]: each.get("value") for each in env}[name]

    assert value("demo-agents", "A") == "2"
    assert value("demo-reward", "A") == "1"
    assert value("demo-agents", "HF_HUB_OFFLINE") == "0"


def test_marks_of_all_pods_are_on_the_servers_pods(render: Render) -> None:
    change = {
        "defaults": {"podAnnotations": {"a": "all"}, "podLabels": {"l": "all"}},
        "redis": {"podAnnotations": {"b": "own"}, "podLabels": {"l": "own"}},
    }
    objects = render("laptop-cpu", change)
    nats, redis = (
        objects["StatefulSet", f"demo-{server}"]["spec"]["template"]["metadata"]
        for server in ("nats", "redis")
    )
    assert nats["annotations"]["a"] == "all"
    assert nats["labels"]["l"] == "all"
    assert redis["annotations"].items() >= {"a": "all", "b": "own"}.items()
    assert redis["labels"]["l"] == "own"


def test_a_digest_is_found_by_both_names_of_a_service(render: Render) -> None:
    for name in ("weight_sync", "weight-sync"):
        objects = render("laptop-cpu", {"image": {"digests": {name: f"sha256:{'a' * 64}"}}})
        image = container_of(objects["Deployment", "demo-weight-sync"])["image"]
        assert image == f"tailrace-weight-sync@sha256:{'a' * 64}"


def test_each_upgrade_has_a_job_since_it_starts_the_workloads_again(
    chart: helm_python.Chart, values: dict[str, Any]
) -> None:
    """The Job of an ended run is complete, and stops nothing any more."""

    def job(revision: int) -> str:
        given = merged(values["laptop-cpu"], SEED)
        objects = objects_in(chart.render(given, name="demo", namespace="team", revision=revision))
        (found,) = [name for kind, name in objects if kind == "Job"]
        return found

    assert job(2) != job(3)
    assert job(2) == job(2)


def test_the_scheduler_tells_the_end_until_all_others_have_stopped(render: Render) -> None:
    """A pod of the Job that starts again on the way would take its silence for a failure."""
    (job,) = [each for (kind, _), each in render().items() if kind == "Job"]
    stops = container_of(job)["args"][container_of(job)["args"].index("--then-stop") + 1 :]
    stages = " ".join(stops).split(" - ")
    assert stages[-2:] == ["Deployment/demo-scheduler", "StatefulSet/demo-nats StatefulSet/demo-redis"]


def test_a_judge_elsewhere_needs_no_gateway(render: Render) -> None:
    judge = {"base_url": "https://judge.example.org/v1", "model": "m", "prompt": "{reply}"}
    rewards = [{"name": "judge", "kind": "judge", "judge": judge}]
    objects = render("laptop-cpu", {"experiment": {"reward": {"rewards": rewards}}})
    assert ("Deployment", "demo-gateway") not in objects


# Servers


@pytest.mark.parametrize(("fsync", "on_rewrite"), [("always", "no"), ("everysec", "yes")])
def test_with_fsync_always_redis_syncs_while_it_rewrites_its_log(
    fsync: str, on_rewrite: str, render: Render
) -> None:
    objects = render("laptop-cpu", {"redis": {"fsync": fsync}})
    config = objects["Secret", "demo-redis-config"]["stringData"]["redis.conf"].splitlines()
    assert f"no-appendfsync-on-rewrite {on_rewrite}" in config


# Network


def test_ports_of_brought_servers_and_receivers_are_open(render: Render) -> None:
    change = {
        "nats": {"external": {"url": "tls://a.example.org:4333,tls://b.example.org"}},
        "redis": {"external": {"url": "rediss://c.example.org:6380/0"}},
        "telemetry": {"otlpEndpoint": "https://otel.example.org/v1"},
    }
    assert egress_ports(render("laptop-cpu", change), "agents") == {4333, 4222, 6380, 4317, 4318, 443}


@pytest.mark.parametrize(
    ("url", "port"),
    [
        ("https://git.example.org/x.git", 443),
        ("http://user:12@git.example.org:3000/x.git", 3000),
        ("ssh://git@git.example.org:2222/x.git", 2222),
        ("git@git.example.org:x.git", 22),
    ],
)
def test_the_repository_of_the_modules_is_reached_by_their_readers(
    url: str, port: int, render: Render
) -> None:
    objects = render("laptop-cpu", {"userCode": {"git": {"url": url, "image": "git:1"}}})
    for part in ("scheduler", "agents", "reward", "learner", "inference-default"):
        assert egress_ports(objects, part) == {port}
    assert egress_ports(objects, "weight-sync") == set()


def test_names_are_asked_where_the_cluster_answers(render: Render) -> None:
    def asked(*changes: dict[str, Any]) -> list[Any]:
        (rule,) = [
            rule
            for rule in render("laptop-cpu", *changes)["NetworkPolicy", "demo-agents"]["spec"]["egress"]
            if {"port": 53, "protocol": "UDP"} in rule.get("ports", ())
        ]
        return rule["to"]

    local = {"ipBlock": {"cidr": "169.254.20.10/32"}}
    assert local in asked(), "a NodeLocal DNSCache"
    openshift = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "openshift-dns"}}}
    assert asked({"networkPolicy": {"dnsTo": [openshift]}}) == [openshift]


def test_who_loads_a_model_reaches_the_hub_when_it_may(render: Render) -> None:
    objects = render("laptop-cpu", {"storage": {"hub": {"offline": False}}})
    reach = {part for part in ("learner", "inference-default", "reward", "agents", "scheduler")
             if 443 in egress_ports(objects, part)}  # fmt: skip
    assert reach == {"learner", "inference-default", "reward"}


def test_the_api_server_is_reached_at_the_ports_that_distributions_give_it(render: Render) -> None:
    assert egress_ports(render(), "run") == {443, 6443, 8443, 16443}


def test_the_modules_of_git_come_into_a_folder_of_another_user_and_come_again(
    tmp_path: Path, render: Render
) -> None:
    """The volume belongs to root; after a node's new start the init container finds it full."""
    objects = render("laptop-cpu", {"userCode": {"git": {"url": "u", "image": "git:1"}}})
    (init,) = pod_of(objects["Deployment", "demo-agents"])["initContainers"]
    source, volume, system = tmp_path / "source", tmp_path / "volume", tmp_path / "system"
    volume.mkdir()
    system.write_text(f"[safe]\n\tdirectory = {source}/.git\n[user]\n\temail = a@b\n\tname = a\n")
    env = os.environ | {
        "HOME": str(tmp_path),
        "GIT_CONFIG_SYSTEM": str(system),
        "URL": source.as_uri(),
        "REF": "main",
    }

    def git(*arguments: str) -> None:
        subprocess.run(["git", "-C", str(source), *arguments], check=True, env=env)

    subprocess.run(["git", "init", "--quiet", "-b", "main", str(source)], check=True, env=env)
    (script,) = init["args"]
    for text in ("x = 1\n", "x = 2\n"):
        (source / "mine.py").write_text(text)
        git("add", ".")
        git("commit", "--quiet", "--message", "m")
        subprocess.run(
            [*init["command"], script.replace("/opt/user", str(volume))],
            check=True,
            env=env | {"GIT_TEST_ASSUME_DIFFERENT_OWNER": "1"},
        )
        assert (volume / "mine.py").read_text() == text


def test_weights_in_files_and_the_log_of_emissions_have_the_volume_of_the_runs(render: Render) -> None:
    def with_runs(experiment: dict[str, Any]) -> set[str]:
        found = workloads(render("laptop-cpu", {"experiment": experiment}))
        mounts = {each["metadata"]["name"]: container_of(each)["volumeMounts"] for each in found
                  if "tailrace-" in container_of(each)["image"]}  # fmt: skip
        return {name for name, of in mounts.items() if "/runs" in {each["mountPath"] for each in of}}

    usual = {"demo-scheduler", "demo-agents", "demo-learner"}
    assert with_runs({}) == usual
    files = {"weight_sync": {"transport": "files", "volume": "/runs/weights"}}
    assert with_runs(files) == usual | {"demo-weight-sync", "demo-inference-default"}
    assert with_runs({"inference": {"emission_log": True}}) == usual | {"demo-inference-default"}


# Scaling


@pytest.mark.parametrize("mode", ["keda", "hpa"])
def test_scalers_of_two_runs_in_a_namespace_read_their_own_number(mode: str, render: Render) -> None:
    scaling = {"enabled": True, "mode": mode, "prometheusUrl": "http://p"}
    bounds = {"autoscaler": {"targets": {"agents": {"max_replicas": 9}}}}
    objects = render("laptop-cpu", {"autoscaling": scaling, "experiment": bounds})
    if mode == "keda":
        query = objects["ScaledObject", "demo-agents"]["spec"]["triggers"][-1]["metadata"]["query"]
        assert 'run="demo"' in query
    else:
        (metric,) = objects["HorizontalPodAutoscaler", "demo-agents"]["spec"]["metrics"]
        labels = metric["external"]["metric"]["selector"]["matchLabels"]
        assert labels == {"target": "agents", "namespace": "team", "run": "demo"}


def test_keda_reaches_standing_servers_whichever_run_it_scales(render: Render) -> None:
    policy = render("laptop-cpu", {"mode": "standing"})["NetworkPolicy", "demo-nats"]["spec"]
    (peers,) = [each["from"] for each in policy["ingress"] if each["ports"] == [{"port": "monitor"}]]
    assert peers == [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "keda"}}}]


def test_workflows_reach_the_gateway_beside_an_ingress(render: Render) -> None:
    """Policies let agents reach the gateway's pods, not the ingress."""

    def urls(gateway: dict[str, Any], experiment: dict[str, Any]) -> tuple[str, str]:
        gateway = {"enabled": True} | gateway
        found = experiment_of(render("laptop-cpu", {"gateway": gateway, "experiment": experiment}))
        return found["gateway"]["service_url"], found["gateway"]["advertised_url"]

    service = "http://demo-gateway:8000"
    ingress = {"ingress": {"enabled": True, "host": "x.example.org", "tlsSecret": "t"}}
    assert urls({}, {}) == (service, service)
    assert urls(ingress, {}) == (service, "https://x.example.org")
    given = {"gateway": {"advertised_url": "http://lb.example.org:8000"}}
    assert urls({"service": {"type": "LoadBalancer"}}, given) == (service, "http://lb.example.org:8000")


@pytest.mark.parametrize("kind", ["NodePort", "LoadBalancer"])
def test_a_gateway_that_nobody_outside_may_reach_is_told(
    kind: str, chart: helm_python.Chart, values: dict[str, Any]
) -> None:
    given = merged(values["laptop-cpu"], {"gateway": {"enabled": True, "service": {"type": kind}}})
    manifests = chart.render(given, name="demo", namespace="team")
    notes = next(text for path, text in manifests.items() if path.endswith("NOTES.txt"))
    assert f"its Service of type {kind}" in notes
