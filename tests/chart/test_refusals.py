"""Wrong values are refused before anything is made, with the key's name."""

from __future__ import annotations

from typing import Any

import helm_python
import pytest

from tests.chart.conftest import merged

WRONG = {
    "unknown key": ({"agent": {}}, "agent"),
    "unknown key of a service": ({"agents": {"replica": 2}}, "replica"),
    "mode": ({"mode": "batch"}, "mode"),
    "negative replicas": ({"agents": {"replicas": -1}}, "replicas"),
    "replicas as text": ({"reward": {"replicas": "two"}}, "replicas"),
    "engine": ({"inference": {"pools": {"default": {"image": "trt"}}}}, "image"),
    "pool name": ({"inference": {"pools": {"Big_Pool": {"replicas": 1}}}}, "Big_Pool"),
    "digest": ({"image": {"digests": {"agents": "latest"}}}, "agents"),
    "digest of no image": ({"image": {"digests": {"agent": f"sha256:{'0' * 64}"}}}, "agent"),
    "egress of no service": ({"networkPolicy": {"extraEgress": {"weight-sync": []}}}, "weight-sync"),
    "variables of a server": ({"nats": {"env": [{"name": "A", "value": "1"}]}}, "env"),
    "access mode of one pod": (
        {"storage": {"runs": {"accessModes": ["ReadWriteOncePod"]}}}, "accessModes",
    ),
    "pull policy": ({"image": {"pullPolicy": "Sometimes"}}, "pullPolicy"),
    "size": ({"nats": {"storage": "much"}}, "storage"),
    "fsync": ({"redis": {"fsync": "no"}}, "fsync"),
    "autoscaling mode": ({"autoscaling": {"mode": "magic"}}, "mode"),
    "url": ({"nats": {"external": {"url": "host:4222"}}}, "url"),
    "access mode": ({"storage": {"runs": {"accessModes": ["RWX"]}}}, "accessModes"),
    "no access mode": ({"storage": {"runs": {"accessModes": []}}}, "accessModes"),
    "log level": ({"telemetry": {"logLevel": "loud"}}, "logLevel"),
    "experiment: unknown key": ({"experiment": {"max_step": 3}}, "max_step"),
    "experiment: type": ({"experiment": {"group_size": "eight"}}, "group_size"),
    "experiment: section's unknown key": ({"experiment": {"learner": {"lr": 1}}}, "lr"),
    "experiment: section's value": ({"experiment": {"inference": {"device": "tpu"}}}, "device"),
    "experiment: nested": ({"experiment": {"learner": {"strategy_args": {"ranks": 2}}}}, "ranks"),
    "epochs": ({"experiment": {"num_epochs": 2}}, "num_epochs"),
    "no run's name": ({"experiment": {"exp_name": ""}}, "exp_name"),
    "run name": ({"mode": "standing", "standing": {"runs": ["a b"]}}, "runs"),
    "broadcast beside TLS": (
        {"tls": {"enabled": True}, "experiment": {"weight_sync": {"transport": "broadcast"}}},
        "transport: broadcast sends weights without encryption, and tls.enabled demands it",
    ),
    "a brought server without encryption beside TLS": (
        {"tls": {"enabled": True, "existingSecret": "mine"},
         "redis": {"external": {"url": "redis://user:word@a:6379"}}},
        "redis.external.url: redis://a:6379 has no encryption, and tls.enabled demands it: take rediss://",
    ),
    "one of several brought servers without encryption beside TLS": (
        {"tls": {"enabled": True, "existingSecret": "mine"},
         "nats": {"external": {"url": "tls://a:4222,nats://b:4222"}}},
        "nats.external.url: nats://b:4222 has no encryption",
    ),
    "a brought server whose certificate nobody vouches for": (
        {"tls": {"enabled": True}, "nats": {"external": {"url": "tls://a:4222"}}},
        "tls.existingSecret: nats.external.url is a server whose certificate this release did not make",
    ),
    "a resource of no device plugin": ({"defaults": {"gpuResource": "gpu"}}, "gpuResource"),
    "root": ({"defaults": {"runAsUser": 0}}, "runAsUser"),
    "both servers": (
        {"servers": {"release": "x"}, "nats": {"external": {"url": "nats://a:4222"}}},
        "servers.release",
    ),
    "brought secrets without servers": ({"credentials": {"existingSecrets": True}}, "existingSecrets"),
    "short grace": ({"agents": {"terminationGracePeriodSeconds": 8}}, "terminationGracePeriodSeconds"),
    "grace below the experiment's drain": (
        {"experiment": {"inference": {"drain_s": 300}},
         "inference": {"pools": {"default": {"terminationGracePeriodSeconds": 90}}}},
        "inference-default.terminationGracePeriodSeconds",
    ),
    "standing release without servers": (
        {"mode": "standing", "nats": {"external": {"url": "nats://a:4222"}}}, "nats.external",
    ),
    "pool whose workload has too long a name": (
        {"inference": {"pools": {"p" * 38: {"replicas": 1}}}},
        "is too long for the name of a StatefulSet (53 characters, at most 52)",
    ),
    "nodes": ({"learner": {"nodes": 2}}, "learner.nodes"),
    "scaling without targets": ({"autoscaling": {"enabled": True}}, "experiment.autoscaler.targets"),
    "scaling an unknown pool": (
        {"autoscaling": {"enabled": True},
         "experiment": {"autoscaler": {"targets": {"inference-big": {"max_replicas": 2}}}}},
        "inference-big",
    ),
    "bounds in no order": (
        {"autoscaling": {"enabled": True},
         "experiment": {"autoscaler": {"targets": {"agents": {"min_replicas": 4}}}}},
        "experiment.autoscaler.targets.agents: min_replicas is 4 and max_replicas 1",
    ),
    "sandbox of containers in a pod": (
        {"sandbox": {"replicas": 1}, "experiment": {"sandbox": {"backend": "docker"}}},
        "experiment.sandbox.backend is docker",
    ),
    "KEDA without Prometheus": (
        {"autoscaling": {"enabled": True, "mode": "keda"},
         "experiment": {"autoscaler": {"targets": {"sandbox": {"max_replicas": 2}}}}},
        "autoscaling.prometheusUrl",
    ),
    "workflow without gateway": (
        {"experiment": {"agents": {"workflow": {"agent": "m.Agent"}}}}, "gateway.enabled",
    ),
    "judge of the run without gateway": (
        {"experiment": {"reward": {"rewards": [
            {"name": "j", "kind": "judge", "judge": {"base_url": "gateway", "prompt": "p"}}]}}},
        "gateway.enabled",
    ),
    "sandboxes of the experiment without a pod": (
        {"experiment": {"cluster": {"num_sandboxes": 2}}},
        "sandbox.replicas is 0, and experiment.cluster.num_sandboxes 2",
    ),
    "programs to score without a sandbox": (
        {"experiment": {"reward": {"rewards": [
            {"name": "tests", "kind": "scorer", "scorer": "code"}]}}},
        "sandbox.replicas is 0, and the scorer of experiment.reward tests",
    ),
    "GPU for a CPU engine": ({"inference": {"pools": {"default": {"gpus": 1}}}}, "gpus"),
    "GPUs beside the parallel sizes": (
        {"inference": {"pools": {"default": {"gpus": 4, "image": "inference-vllm"}}},
         "experiment": {"inference": {"device": "cuda", "engine": "vllm", "tensor_parallel_size": 8}}},
        "inference.pools.default.gpus is 4",
    ),
    "GPUs of two nodes": (
        {"inference": {"pools": {"default": {"gpus": 4, "nodes": 2, "image": "inference-vllm"}}},
         "experiment": {"inference": {"device": "cuda", "engine": "vllm", "num_nodes": 2,
                                      "tensor_parallel_size": 4}}},
        "inference.pools.default.gpus is 4, of each of 2 nodes",
    ),
    "nodes beside the section's": (
        {"inference": {"pools": {"default": {"nodes": 2}}}},
        "inference.pools.default.nodes is 2, and num_nodes of its section inference is 1",
    ),
    "nodes of an engine that has one": (
        {"inference": {"pools": {"default": {"nodes": 2, "overrides": {"num_nodes": 2}}}}},
        "inference.pools.default.nodes is 2: a server of the engine torch has one node",
    ),
    "nodes of a server beside TLS": (
        {"tls": {"enabled": True},
         "inference": {"pools": {"default": {"gpus": 4, "nodes": 2, "image": "inference-vllm"}}},
         "experiment": {"inference": {"device": "cuda", "engine": "vllm", "num_nodes": 2,
                                      "tensor_parallel_size": 8}}},
        "nodes is 2: the nodes of a server talk without encryption, and tls.enabled demands it",
    ),
    "nodes of a learner beside TLS": (
        {"tls": {"enabled": True}, "learner": {"nodes": 2},
         "experiment": {"learner": {"strategy_args": {"num_ranks": 2}}}},
        "learner.nodes is 2: the ranks of the learner talk without encryption, and tls.enabled demands",
    ),
    "nodes of a colocated learner": (
        {"learner": {"nodes": 2},
         "experiment": {"colocated": True, "learner": {"strategy_args": {"num_ranks": 2}}}},
        "experiment.colocated: the learner takes turns with servers of one machine, and learner.nodes",
    ),
    "shared memory above the limit": (
        {"learner": {"shm": "36Gi", "resources": {"limits": {"memory": "16Gi"}}}},
        "learner.shm is 36Gi, and resources.limits.memory 16Gi",
    ),
    "shared memory of a pool above the limit": (
        {"inference": {"pools": {"wide": {"shm": "9Gi"}}}}, "inference.pools.wide.shm is 9Gi",
    ),
    "colocated pods": ({"experiment": {"colocated": True}}, "experiment.colocated: learner and"),
    "weights on no volume": (
        {"experiment": {"weight_sync": {"transport": "files", "volume": "/shared"}}},
        "experiment.weight_sync.volume: /shared is on no volume of the pods",
    ),
    "image of another engine": (
        {"experiment": {"inference": {"engine": "sglang"}}}, "take inference-sglang",
    ),
    "two sources of code": (
        {"userCode": {"git": {"url": "u", "image": "i"}, "image": {"name": "n"}}}, "userCode",
    ),
    "module in a folder": ({"userCode": {"files": {"pkg/mine.py": "x = 1"}}}, "pkg/mine.py"),
    "git without image": ({"userCode": {"git": {"url": "u"}}}, "userCode.git.image"),
    "ingress without host": (
        {"gateway": {"enabled": True, "ingress": {"enabled": True}}}, "gateway.ingress.host",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", WRONG)
def test_a_wrong_value_is_refused_by_the_name_of_its_key(
    what: str, chart: helm_python.Chart, values: dict[str, dict[str, Any]]
) -> None:
    change, named = WRONG[what]
    with pytest.raises(helm_python.HelmError) as refused:
        chart.render(merged(values["laptop-cpu"], change), name="demo", namespace="team")
    assert named in str(refused.value)
