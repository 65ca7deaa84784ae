"""Experiment, probes, placement, learner, storage and user code in the rendered objects."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.chart.conftest import (
    SERVICES,
    Render,
    container_of,
    experiment_of,
    pod_of,
    workloads,
)


def seconds(workload: dict[str, Any]) -> int:
    return pod_of(workload)["terminationGracePeriodSeconds"]


def test_the_last_words_of_a_failed_container_are_in_its_pods_status(render: Render) -> None:
    policies = {container_of(each)["terminationMessagePolicy"] for each in workloads(render())}
    assert policies == {"FallbackToLogsOnError"}


# Experiment


def test_the_services_read_the_users_experiment_with_the_addresses_of_pods(
    render: Render, values: Any
) -> None:
    found, given = experiment_of(render()), values["laptop-cpu"]["experiment"]
    assert found["output_dir"] == "/runs"
    assert found["gateway"]["host"] == "0.0.0.0"
    assert [found[key]["bind_host"] for key in ("inference", "weight_sync", "learner")] == [
        "0.0.0.0"
    ] * 3
    for key in ("exp_name", "max_steps", "agents", "scheduler", "reward"):
        assert found[key] == given[key]
    for key, value in given["learner"].items():
        assert found["learner"][key] == value


def test_small_numbers_stay_numbers(render: Render) -> None:
    found = experiment_of(render("node-8gpu"))
    assert found["learner"]["training_args"]["learning_rate"] == 1e-6


def test_the_demo_of_the_values_is_the_example(values: Any) -> None:
    import yaml

    from tests.chart.conftest import ROOT

    example = yaml.safe_load((ROOT / "examples/frozen_lake/experiment.yaml").read_text())
    ours = values["laptop-cpu"]["experiment"]
    assert {**ours, "exp_name": "frozen_lake", "output_dir": "runs"} == example


def test_a_changed_experiment_restarts_its_readers(render: Render) -> None:
    def checksum(*changes: dict[str, Any]) -> str:
        template = render("laptop-cpu", *changes)["Deployment", "demo-agents"]["spec"]["template"]
        return template["metadata"]["annotations"]["checksum/experiment"]

    assert checksum() != checksum({"experiment": {"max_steps": 7}})
    assert checksum() == checksum({"agents": {"replicas": 3}})


def test_changed_keys_of_a_pool_restart_its_servers_alone(render: Render) -> None:
    def checksums(max_running: int) -> list[str]:
        wide = {"replicas": 1, "overrides": {"max_running": max_running}}
        pools = {"default": {"replicas": 1}, "wide": wide}
        objects = render("laptop-cpu", {"inference": {"pools": pools}})
        found = (objects["StatefulSet", f"demo-inference-{pool}"]["spec"]["template"] for pool in pools)
        return [each["metadata"]["annotations"]["checksum/experiment"] for each in found]

    (default, wide), (same, wider) = checksums(8), checksums(9)
    assert default == same
    assert wide != wider


def test_changed_modules_restart_their_importers(render: Render) -> None:
    def annotations(text: str, name: str) -> dict[str, str]:
        objects = render("laptop-cpu", {"userCode": {"files": {"my_reward.py": text}}})
        found: dict[str, str] = objects["Deployment", name]["spec"]["template"]["metadata"][
            "annotations"
        ]
        return found

    assert annotations("a = 1", "demo-reward") != annotations("a = 2", "demo-reward")
    assert annotations("a = 1", "demo-weight-sync") == annotations("a = 2", "demo-weight-sync")


def test_a_pool_may_have_no_server(render: Render) -> None:
    objects = render("laptop-cpu", {"inference": {"pools": {"default": {"replicas": 0}}}})
    assert objects["StatefulSet", "demo-inference-default"]["spec"]["replicas"] == 0


def test_a_pool_may_have_keys_of_its_own(render: Render) -> None:
    pools = {"default": {"replicas": 1}, "wide": {"replicas": 2, "overrides": {"max_running": 8}}}
    grace = {"terminationGracePeriodSeconds": 90}
    pools = {name: each | grace for name, each in pools.items()}
    objects = render("laptop-cpu", {"inference": {"pools": pools}})
    assert experiment_of(objects, "demo-experiment-wide")["inference"]["max_running"] == 8
    assert experiment_of(objects)["inference"]["max_running"] == 256
    volumes = {
        each["name"]: each for each in pod_of(objects["StatefulSet", "demo-inference-wide"])["volumes"]
    }
    assert volumes["experiment"]["configMap"]["name"] == "demo-experiment-wide"


# Probes, drains, disruption


@pytest.mark.parametrize("part", SERVICES)
def test_services_are_probed_where_they_answer(part: str, everything: Any) -> None:
    container = container_of(everything["Deployment", f"demo-{part}"])
    assert container["livenessProbe"]["httpGet"] == {"path": "/livez", "port": "metrics"}
    assert container["readinessProbe"]["httpGet"] == {"path": "/readyz", "port": "metrics"}
    assert {"name": "metrics", "containerPort": 9090} in container["ports"]
    env = {each["name"]: each.get("value") for each in container["env"]}
    assert (env["TAILRACE_METRICS_HOST"], env["TAILRACE_METRICS_PORT"]) == ("0.0.0.0", "9090")


def test_a_slow_start_is_no_reason_to_kill(everything: Any) -> None:
    probe = container_of(everything["StatefulSet", "demo-inference-default"])["startupProbe"]
    assert probe["periodSeconds"] * probe["failureThreshold"] >= 600


def test_grace_exceeds_the_drain_of_each_service(everything: Any) -> None:
    assert seconds(everything["Deployment", "demo-agents"]) > 5
    assert seconds(everything["StatefulSet", "demo-inference-default"]) >= 60
    assert seconds(everything["StatefulSet", "demo-learner"]) >= 60


def test_grace_follows_the_drain_of_experiment_and_pool(render: Render) -> None:
    drains = {"learner": {"drain_s": 300}, "agents": {"drain_s": 100.5}}
    pools = {"default": {"replicas": 1}, "slow": {"replicas": 1, "overrides": {"drain_s": 200}}}
    objects = render("laptop-cpu", {"experiment": drains, "inference": {"pools": pools}})
    assert seconds(objects["StatefulSet", "demo-learner"]) == 315
    assert seconds(objects["Deployment", "demo-agents"]) == 116
    assert seconds(objects["StatefulSet", "demo-inference-slow"]) == 215
    assert seconds(objects["StatefulSet", "demo-inference-default"]) == 60
    assert seconds(objects["Deployment", "demo-scheduler"]) == 60
    longer = render("laptop-cpu", {"agents": {"terminationGracePeriodSeconds": 500}})
    assert seconds(longer["Deployment", "demo-agents"]) == 500


def test_a_checkpoint_is_saved_before_a_large_learner_ends(render: Render) -> None:
    for name, drain_s in (("node-8gpu", 240), ("cluster-64gpu", 600)):
        assert seconds(render(name)["StatefulSet", "demo-learner"]) == drain_s + 15


def test_the_gateway_leaves_its_service_before_it_drains(everything: Any) -> None:
    lifecycle = container_of(everything["Deployment", "demo-gateway"])["lifecycle"]
    assert lifecycle["preStop"]["exec"]["command"][0] == "sleep"


def test_nats_and_redis_outlive_a_learner_that_is_evicted_with_them(render: Render) -> None:
    objects = render("laptop-cpu", {"experiment": {"learner": {"drain_s": 100}}})
    for name in ("demo-nats", "demo-redis"):
        workload = objects["StatefulSet", name]
        command = container_of(workload)["lifecycle"]["preStop"]["exec"]["command"]
        assert command == ["sleep", "105"]
        assert seconds(workload) > 105


def test_evictions_take_one_pod_at_a_time(render: Render) -> None:
    objects = render("node-8gpu")
    budget = objects["PodDisruptionBudget", "demo-inference-default"]["spec"]
    assert budget["maxUnavailable"] == 1
    labels = objects["StatefulSet", "demo-inference-default"]["spec"]["template"]["metadata"]["labels"]
    assert budget["selector"]["matchLabels"].items() <= labels.items()


def test_schedulers_replace_each_other_without_a_surge(everything: Any) -> None:
    strategy = everything["Deployment", "demo-scheduler"]["spec"]["strategy"]
    assert strategy["rollingUpdate"] == {"maxSurge": 0, "maxUnavailable": 1}


def test_by_default_two_schedulers_stand(render: Render) -> None:
    assert render("node-8gpu")["Deployment", "demo-scheduler"]["spec"]["replicas"] == 2


def test_weight_sync_never_runs_twice(everything: Any) -> None:
    spec = everything["Deployment", "demo-weight-sync"]["spec"]
    assert (spec["replicas"], spec["strategy"]) == (1, {"type": "Recreate"})


# Placement and resources


def test_gpus_are_asked_for_by_pool_and_learner(render: Render) -> None:
    objects = render("cluster-64gpu")
    for name, count in (("demo-inference-default", 4), ("demo-learner", 8)):
        resources = container_of(objects["StatefulSet", name])["resources"]
        assert resources["limits"]["nvidia.com/gpu"] == count
        assert resources["requests"]["nvidia.com/gpu"] == count
    total = objects["StatefulSet", "demo-inference-default"]["spec"]["replicas"] * 4
    assert total + objects["StatefulSet", "demo-learner"]["spec"]["replicas"] * 8 == 64


def test_shared_memory_has_a_size(everything: Any) -> None:
    for kind, name in (("StatefulSet", "demo-learner"), ("StatefulSet", "demo-inference-default")):
        volumes = {each["name"]: each for each in pod_of(everything[kind, name])["volumes"]}
        assert volumes["shm"]["emptyDir"] == {"medium": "Memory", "sizeLimit": "256Mi"}
        mounts = {
            each["name"]: each["mountPath"]
            for each in container_of(everything[kind, name])["volumeMounts"]
        }
        assert mounts["shm"] == "/dev/shm"


def test_every_container_asks_for_cpu_and_memory_and_has_a_memory_limit(everything: Any) -> None:
    for each in workloads(everything):
        resources = container_of(each)["resources"]
        assert {"cpu", "memory"} <= resources["requests"].keys(), each["metadata"]["name"]
        assert "memory" in resources["limits"], each["metadata"]["name"]


def test_defaults_place_every_pod_and_a_service_wins(render: Render) -> None:
    place = {
        "nodeSelector": {"pool": "a"},
        "tolerations": [{"key": "k", "operator": "Exists"}],
        "priorityClassName": "high",
        "schedulerName": "volcano",
        "podLabels": {"team": "x"},
        "podAnnotations": {"note": "y"},
    }
    objects = render("laptop-cpu", {"defaults": place, "reward": {"nodeSelector": {"pool": "b"}}})
    for each in workloads(objects):
        pod = pod_of(each)
        wanted = {"pool": "b"} if each["metadata"]["name"] == "demo-reward" else {"pool": "a"}
        assert pod["nodeSelector"] == wanted
        assert pod["tolerations"] == place["tolerations"]
        assert (pod["priorityClassName"], pod["schedulerName"]) == ("high", "volcano")
    meta = objects["Deployment", "demo-agents"]["spec"]["template"]["metadata"]
    assert meta["labels"]["team"] == "x"
    assert meta["annotations"]["note"] == "y"


def test_queue_labels_are_on_the_workloads(render: Render) -> None:
    objects = render("cluster-64gpu")
    for each in workloads(objects):
        if each["kind"] != "Pod":
            assert each["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "training"


def test_replicas_spread_over_nodes(everything: Any) -> None:
    for kind, name in (("Deployment", "demo-agents"), ("StatefulSet", "demo-inference-default")):
        (spread,) = pod_of(everything[kind, name])["topologySpreadConstraints"]
        assert spread["topologyKey"] == "kubernetes.io/hostname"


def test_the_sandbox_has_a_runtime_of_its_own_and_no_user_code(everything: Any) -> None:
    pod = pod_of(everything["Deployment", "demo-sandbox"])
    assert pod["runtimeClassName"] == "gvisor"
    assert {each["name"] for each in pod["volumes"]} == {
        "experiment",
        "credentials",
        "tmp",
        "state",
        "tls",
    }
    assert "runtimeClassName" not in pod_of(everything["Deployment", "demo-agents"])


def test_images_follow_registry_tag_and_digest(render: Render) -> None:
    digest = "sha256:" + "a" * 64
    image = {
        "registry": "r.example.org/x/",
        "tag": "7",
        "digests": {"agents": digest},
        "pullSecrets": [{"name": "p"}],
    }
    objects = render("laptop-cpu", {"image": image})
    assert (
        container_of(objects["Deployment", "demo-agents"])["image"]
        == f"r.example.org/x/tailrace-agents@{digest}"
    )
    sync = objects["Deployment", "demo-weight-sync"]
    assert container_of(sync)["image"] == "r.example.org/x/tailrace-weight-sync:7"
    assert pod_of(sync)["imagePullSecrets"] == [{"name": "p"}]


# Learner


def test_the_learners_nodes_meet_at_the_first(render: Render) -> None:
    objects = render("cluster-64gpu")
    env = {each["name"]: each for each in container_of(objects["StatefulSet", "demo-learner"])["env"]}
    assert env["TAILRACE_NUM_NODES"]["value"] == "2"
    assert env["TAILRACE_NODE_RANK"]["value"] == "$(POD_NAME)"
    assert env["TAILRACE_MASTER"]["value"] == "demo-learner-0.demo-learner:29400"
    names = list(env)
    assert names.index("POD_NAME") < names.index("TAILRACE_NODE_RANK")
    service = objects["Service", "demo-learner"]["spec"]
    assert (service["clusterIP"], service["publishNotReadyAddresses"]) == ("None", True)
    assert objects["StatefulSet", "demo-learner"]["spec"]["serviceName"] == "demo-learner"
    assert objects["StatefulSet", "demo-learner"]["spec"]["podManagementPolicy"] == "Parallel"


def test_one_node_needs_no_rendezvous(render: Render) -> None:
    names = {each["name"] for each in container_of(render()["StatefulSet", "demo-learner"])["env"]}
    assert "TAILRACE_MASTER" not in names


# Storage


def test_the_run_directory_is_shared_by_those_that_write_it(render: Render) -> None:
    objects = render()
    for kind, name in (
        ("Deployment", "scheduler"),
        ("Deployment", "agents"),
        ("StatefulSet", "learner"),
    ):
        volumes = {each["name"]: each for each in pod_of(objects[kind, f"demo-{name}"])["volumes"]}
        assert volumes["runs"]["persistentVolumeClaim"]["claimName"] == "demo-runs"
    assert "resource-policy" not in json.dumps(objects["PersistentVolumeClaim", "demo-runs"])
    kept = render("laptop-cpu", {"storage": {"runs": {"keep": True}}})[
        "PersistentVolumeClaim", "demo-runs"
    ]
    assert kept["metadata"]["annotations"]["helm.sh/resource-policy"] == "keep"


def test_uninstall_leaves_no_volume(everything: Any) -> None:
    for each in workloads(everything):
        assert "volumeClaimTemplates" not in each["spec"], "their claims would stay"


def test_an_own_claim_replaces_ours(render: Render) -> None:
    objects = render("laptop-cpu", {"storage": {"runs": {"existingClaim": "mine"}}})
    assert ("PersistentVolumeClaim", "demo-runs") not in objects
    volumes = {each["name"]: each for each in pod_of(objects["StatefulSet", "demo-learner"])["volumes"]}
    assert volumes["runs"]["persistentVolumeClaim"]["claimName"] == "mine"


def test_an_object_store_is_reached_by_learner_and_reward_with_credentials_in_a_file(
    render: Render,
) -> None:
    store = {"credentialsSecret": "keys", "endpoint": "http://minio.data:9000", "region": "eu"}
    objects = render("laptop-cpu", {"storage": {"objectStore": store, "state": "40Gi"}})
    learner = objects["StatefulSet", "demo-learner"]
    env = {each["name"]: each.get("value") for each in container_of(learner)["env"]}
    assert env["AWS_SHARED_CREDENTIALS_FILE"] == "/etc/tailrace-store/credentials"
    assert (env["AWS_ENDPOINT_URL"], env["AWS_DEFAULT_REGION"]) == ("http://minio.data:9000", "eu")
    volumes = {each["name"]: each for each in pod_of(learner)["volumes"]}
    assert volumes["store"]["secret"]["secretName"] == "keys"
    assert volumes["state"]["emptyDir"]["sizeLimit"] == "40Gi"
    reached = {
        name
        for (kind, name), each in objects.items()
        if kind == "NetworkPolicy" and {"port": 9000, "protocol": "TCP"} in
        [port for rule in each["spec"].get("egress") or () for port in rule.get("ports", ())]
    }  # fmt: skip
    assert reached == {"demo-learner", "demo-reward"}
    for (kind, name), each in objects.items():
        if kind in ("Deployment", "StatefulSet") and name not in ("demo-learner", "demo-reward"):
            assert "tailrace-store" not in json.dumps(each)


def test_a_url_in_the_experiment_opens_the_way_to_the_store(render: Render) -> None:
    def ports(*changes: dict[str, Any]) -> list[Any]:
        rules = render("laptop-cpu", *changes)["NetworkPolicy", "demo-learner"]["spec"]["egress"]
        return [rule["ports"] for rule in rules if "to" not in rule]

    assert ports() == []
    url = {"experiment": {"learner": {"checkpoint_url": "s3://bucket/runs"}}}
    assert ports(url) == [[{"port": 443, "protocol": "TCP"}]]


def test_models_are_mounted_read_only(render: Render) -> None:
    mounts = {
        each["name"]: each
        for each in container_of(render("node-8gpu")["StatefulSet", "demo-learner"])["volumeMounts"]
    }
    assert mounts["models"] == {"name": "models", "mountPath": "/models", "readOnly": True}


def test_redis_writes_its_log_and_drops_no_key(render: Render) -> None:
    config = render("node-8gpu")["Secret", "demo-redis-config"]["stringData"]["redis.conf"]
    for line in ("appendonly yes", "appendfsync always", "maxmemory-policy noeviction"):
        assert line in config


# User code


def test_modules_in_the_values_can_be_imported(render: Render) -> None:
    objects = render("laptop-cpu", {"userCode": {"files": {"mine.py": "x = 1\n"}}})
    assert objects["ConfigMap", "demo-code"]["data"] == {"mine.py": "x = 1\n"}
    env = {
        each["name"]: each.get("value")
        for each in container_of(objects["StatefulSet", "demo-learner"])["env"]
    }
    assert env["PYTHONPATH"] == "/opt/user"


def test_modules_come_from_git_or_an_image(everything: Any, render: Render) -> None:
    (init,) = pod_of(everything["Deployment", "demo-agents"])["initContainers"]
    assert {each["name"]: each["value"] for each in init["env"]}[
        "URL"
    ] == "https://example.org/code.git"
    objects = render("laptop-cpu", {"userCode": {"image": {"name": "mine:1", "path": "/src"}}})
    (init,) = pod_of(objects["Deployment", "demo-reward"])["initContainers"]
    assert init["command"] == ["cp", "-r", "/src/.", "/opt/user"]
