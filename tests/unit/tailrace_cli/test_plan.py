"""Processes of a local cluster, their arguments and environment."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from msgspec import convert

from tailrace.config import ConfigError, TracingArgs
from tailrace_cli.cluster import plan as cluster_plan
from tailrace_cli.cluster.local import LocalCluster
from tailrace_cli.cluster.permissions import SERVICE_USERS
from tailrace_cli.cluster.placement import given_gpus
from tailrace_cli.cluster.plan import (
    ProcessSpec,
    Site,
    inference_python,
    service_specs,
    tool_worker_specs,
)
from tailrace_cli.cluster.servers import ServerAddresses, nats_server_binary, redis_server_binary
from tailrace_cli.config import ClusterConfig
from tailrace_cli.experiment import count_gateways, load

EXAMPLE = Path(__file__).parents[3] / "examples" / "frozen_lake" / "experiment.yaml"
PASSWORDS = {user: f"key of {user}" for user in SERVICE_USERS}


def plan(config: ClusterConfig, num_gateways: int = 0, folder: Path | None = None) -> list[ProcessSpec]:
    connection = ServerAddresses("nats://here", "redis://here", PASSWORDS)
    site = Site(Path("run/config.yaml"), Path("run/state"), connection, 1, 4711, folder)
    return [*tool_worker_specs(config, "run", site), *service_specs(config, num_gateways, site)]


def test_gateways_and_sandboxes_are_started_before_the_agents_that_call_them() -> None:
    names = [spec.name for spec in plan(ClusterConfig(num_sandboxes=1, num_agents_workers=2), 2)]
    assert names == [
        "weight_sync",
        "learner",
        "inference",
        "scheduler",
        "reward",
        "sandbox",
        "gateway-0",
        "gateway-1",
        "agents-0",
        "agents-1",
    ]


def test_reward_workers_are_as_many_as_the_section_says() -> None:
    names = [spec.name for spec in plan(ClusterConfig(num_reward_workers=3))]
    assert [name for name in names if name.startswith("reward")] == ["reward-0", "reward-1", "reward-2"]


def test_replicas_of_the_gateway_share_a_port_that_nobody_else_is_told() -> None:
    told = {
        spec.name: spec.env["TAILRACE_GATEWAY_PORT"]
        for spec in plan(ClusterConfig(), 2)
        if "TAILRACE_GATEWAY_PORT" in spec.env
    }
    assert told == {"gateway-0": "4711", "gateway-1": "4711"}


def test_every_process_has_the_password_of_its_own_user_only() -> None:
    for spec in plan(ClusterConfig(num_sandboxes=1), 1):
        assert spec.env["TAILRACE_NATS_USER"] == spec.name
        assert [value for value in spec.env.values() if value in PASSWORDS.values()] == [
            f"key of {spec.name}"
        ]


def test_modules_beside_the_experiment_file_can_be_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", "elsewhere")
    for spec in plan(ClusterConfig(), folder=tmp_path):
        assert spec.env["PYTHONPATH"] == f"{tmp_path}:{Path.cwd()}:elsewhere"
    assert load(EXAMPLE).folder == EXAMPLE.parent


def test_a_module_of_the_experiment_comes_before_one_of_its_name_in_the_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for folder in ("mine", "other"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "own_part.py").write_text(f"print({folder!r})\n")
    (tmp_path / "other" / "only_here.py").write_text("print('only here')\n")
    monkeypatch.chdir(tmp_path / "other")
    specs = plan(ClusterConfig(tool_workers=("own_part:add",)), folder=tmp_path / "mine")
    for spec in (specs[0], specs[-1]):  # a tool worker, a service
        python = spec.argv[: spec.argv.index("-m") + 1]
        said = [
            subprocess.run([*python, name], env=spec.env, capture_output=True, text=True).stdout
            for name in ("own_part", "only_here")
        ]
        assert said == ["mine\n", "only here\n"]


def test_variables_that_the_user_names_reach_only_the_processes_with_code_of_his_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("JUDGE_KEY", "OTHER_KEY"):
        monkeypatch.setenv(name, "secret")
    monkeypatch.delenv("NOT_SET", raising=False)
    config = ClusterConfig(
        keep_environment=("JUDGE_KEY", "NOT_SET"), num_sandboxes=1, tool_workers=("mine:add",)
    )
    specs = plan(config, 1)
    assert [spec.name for spec in specs if "JUDGE_KEY" in spec.env] == ["tools-0", "reward", "agents"]
    assert not [spec for spec in specs if {"OTHER_KEY", "NOT_SET"} & set(spec.env)]


def test_variables_of_trackers_stores_and_containers_reach_the_service_that_calls_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    wanted = {
        "MLFLOW_TRACKING_URI": ["learner", "agents"],
        "TRACKIO_DIR": ["learner"],
        "WANDB_API_KEY": ["learner"],
        "AWS_SECRET_ACCESS_KEY": ["learner"],  # code of a user's reward needs none
        "DOCKER_HOST": ["sandbox"],
        "KUBECONFIG": ["sandbox"],
    }
    for name in wanted:
        monkeypatch.setenv(name, "given")
    specs = plan(ClusterConfig(num_sandboxes=1, tool_workers=("mine:add",)), 1)
    told = {name: [spec.name for spec in specs if name in spec.env] for name in wanted}
    assert {name: sorted(names) for name, names in told.items()} == {
        name: sorted(names) for name, names in wanted.items()
    }


def test_the_way_to_the_hub_is_that_of_the_user_and_a_proxy_is_for_other_machines(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "https://mirror.example")
    monkeypatch.setenv("https_proxy", "http://proxy.example:3128")
    monkeypatch.setenv("no_proxy", ".example.org")
    monkeypatch.delenv("NO_PROXY", raising=False)
    environments = {spec.name: spec.env for spec in plan(ClusterConfig(num_sandboxes=1), 1)}
    told = [name for name, env in environments.items() if "HF_ENDPOINT" in env]
    assert told == ["learner", "inference", "reward", "agents"]
    for name in told:
        env = environments[name]
        assert env["https_proxy"] == "http://proxy.example:3128"
        assert env["NO_PROXY"] == env["no_proxy"] == ".example.org,127.0.0.1,localhost,0.0.0.0"
    assert not [name for name in environments.keys() - set(told) if "no_proxy" in environments[name]]


def test_caches_and_tokens_of_the_hub_are_found_where_the_user_keeps_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given = {
        "HF_MODULES_CACHE": "/scratch/modules", "HF_DATASETS_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1",
        "HUGGINGFACE_HUB_CACHE": "/scratch/hub", "HUGGING_FACE_HUB_TOKEN": "secret",
    }  # fmt: skip
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    specs = {spec.name: spec.env for spec in plan(ClusterConfig(num_sandboxes=1), 1)}
    for name in ("learner", "inference", "reward", "agents"):
        assert given.items() <= specs[name].items(), name
    for name in ("scheduler", "sandbox", "gateway", "weight_sync"):
        assert not given.keys() & specs[name].keys(), name


def test_every_process_finds_the_packages_and_caches_of_the_one_that_starts_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given = {
        "PYTHONUSERBASE": "/project/user", "PYTHONNOUSERSITE": "1", "PYTHONSAFEPATH": "1",
        "PYTHONPYCACHEPREFIX": "/scratch/bytecode", "XDG_CACHE_HOME": "/scratch/cache",
    }  # fmt: skip
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    for spec in plan(ClusterConfig(num_sandboxes=1, tool_workers=("mine:add",)), 1):
        assert given.items() <= spec.env.items(), spec.name


def test_variables_of_cuda_nccl_and_engines_reach_the_processes_that_compute_on_gpus(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given = {
        "NCCL_P2P_DISABLE": "1", "TORCH_NCCL_BLOCKING_WAIT": "1", "CUDA_HOME": "/opt/cuda",
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID", "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
        "VLLM_ATTENTION_BACKEND": "FLASH_ATTN", "SGLANG_LOG": "1", "TRITON_CACHE_DIR": "/triton",
        "TORCHINDUCTOR_CACHE_DIR": "/scratch/inductor",
    }  # fmt: skip
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    specs = {spec.name: spec.env for spec in plan(ClusterConfig(num_sandboxes=1), 1)}
    for name in ("learner", "inference", "weight_sync", "reward"):
        assert given.items() <= specs[name].items(), name
    for name in specs.keys() - {"learner", "inference", "weight_sync", "reward"}:
        assert not given.keys() & specs[name].keys(), name


def gpus(config: ClusterConfig) -> dict[str, str]:
    """GPUs of each process that gets some."""
    specs = plan(config)
    key = "CUDA_VISIBLE_DEVICES"
    return {spec.name: spec.env[key] for spec in specs if key in spec.env}


def test_learner_and_servers_see_the_gpus_that_are_theirs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert gpus(ClusterConfig()) == {}
    config = ClusterConfig(learner_gpus=(0, 1), inference_gpus=(2, 3), num_inference_servers=3)
    assert gpus(config) == {
        "learner": "0,1",
        "inference-0": "2",
        "inference-1": "3",
        "inference-2": "2",
    }
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,GPU-7")
    named = gpus(config)
    assert [named["learner"], named["inference-1"], named["agents"]] == ["4,5", "GPU-7", "4,5,6,GPU-7"]


def test_a_run_sees_no_more_gpus_than_it_may_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert set(gpus(ClusterConfig(num_gpus_per_node=0)).values()) == {""}
    config = ClusterConfig(num_gpus_per_node=3, inference_gpus=(1,), reward_gpus=(2,))
    assert gpus(config)["inference"] == "1"
    assert gpus(config)["reward"] == "2"
    assert gpus(config)["learner"] == "0,1,2"


@pytest.mark.parametrize(
    ("visible", "config", "key", "shows"),
    [
        ("4", ClusterConfig(learner_gpus=(0, 1)), "learner_gpus", 1),
        ("", ClusterConfig(inference_gpus=(0,)), "inference_gpus", 0),
        ("-1", ClusterConfig(reward_gpus=(0,)), "reward_gpus", 0),
        ("7", ClusterConfig(num_gpus_per_node=2), "num_gpus_per_node", 1),
    ],
)
def test_gpus_that_the_user_hid_are_never_taken(
    visible: str, config: ClusterConfig, key: str, shows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    told = rf"cluster\.{key} asks for GPU .* CUDA_VISIBLE_DEVICES='{visible}' shows {shows}: "
    with pytest.raises(ConfigError, match=told):
        plan(config)


async def test_a_cluster_that_asks_for_hidden_gpus_starts_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    cluster = LocalCluster(load(EXAMPLE, [f"output_dir={tmp_path}/runs", "cluster.learner_gpus=[0]"]))
    with pytest.raises(ConfigError, match=r"cluster\.learner_gpus"):
        await cluster.start()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("key", "find"),
    [("nats_server_binary", nats_server_binary), ("redis_server_binary", redis_server_binary)],
)
def test_a_server_that_is_not_where_the_user_says_is_named_by_its_key(
    key: str, find: Callable[[ClusterConfig], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "server"
    program.write_text("#!/bin/sh\necho v=9.1.2\n")
    for path in ("/no/such", str(tmp_path), str(program)):  # the last one cannot be executed yet
        with pytest.raises(ConfigError, match=rf"cluster\.{key}: {path} is no program"):
            find(convert({key: path}, ClusterConfig))
    program.chmod(0o700)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert find(convert({key: "~/server"}, ClusterConfig)) == str(program)


def test_a_redis_that_is_too_old_or_none_is_refused(tmp_path: Path) -> None:
    program = tmp_path / "server"
    for said, reason in (("v=6.2.14", "version 6.2; 7.2 or later"), ("", "says no version")):
        program.write_text(f"#!/bin/sh\necho {said}\n")
        program.chmod(0o700)
        with pytest.raises(ConfigError, match=reason):
            redis_server_binary(ClusterConfig(redis_server_binary=str(program)))


def test_no_gpu_may_be_asked_for_where_none_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert set(gpus(ClusterConfig(num_gpus_per_node=0)).values()) == {""}


@pytest.mark.parametrize(
    ("make", "remedy"),
    [
        (lambda: ClusterConfig(num_gpus_per_node=2, learner_gpus=(2,)), r"learner_gpus: .* no GPU 2"),
        (lambda: ClusterConfig(inference_gpus=(-1,)), r"inference_gpus: .* no GPU -1"),
        (
            lambda: given_gpus(ClusterConfig(inference_gpus=(0, 1))),
            "raise cluster.num_inference_servers",
        ),
        (lambda: ClusterConfig(reward_gpus=(0, 1)), "raise cluster.num_reward_workers"),
        (lambda: ClusterConfig(num_gpus_per_node=-1), "num_gpus_per_node"),
        (lambda: ClusterConfig(learner_gpus=(0, 0)), "learner_gpus names GPU 0 twice"),
        (
            lambda: ClusterConfig(inference_gpus=(1, 1), num_inference_servers=2),
            "inference_gpus names GPU 1 twice",
        ),
    ],
)
def test_gpus_that_are_not_there_are_refused(make: Callable[[], object], remedy: str) -> None:
    with pytest.raises(ValueError, match=remedy):
        make()


@pytest.mark.parametrize("name", ["", "JUDGE_KEY=secret", "TAILRACE_GATEWAY_ADMIN_KEY"])
def test_what_is_no_variable_of_the_user_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=r"cluster\.keep_environment"):
        ClusterConfig(keep_environment=(name,))


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ([], 0),
        (["cluster.num_gateways=3"], 3),
        (["agents.workflow.agent=my_module.MyAgent", "cluster.num_gateways=2"], 2),
    ],
)
def test_gateways_are_started_where_they_are_asked_for(overrides: list[str], expected: int) -> None:
    assert count_gateways(load(EXAMPLE, overrides)) == expected


def test_servers_of_another_engine_run_with_the_interpreter_that_has_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(cluster_plan, "find_spec", lambda name: None)
    monkeypatch.setattr(sys, "prefix", str(tmp_path / "elsewhere" / ".venv"))
    assert inference_python(ClusterConfig(), "torch") == sys.executable
    with pytest.raises(ConfigError, match=r"no package vllm: run `make \.venv-vllm/ready`"):
        inference_python(ClusterConfig(), "vllm")
    python = tmp_path / ".venv-vllm" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.touch()
    assert inference_python(ClusterConfig(), "vllm") == str(python)
    named = ClusterConfig(inference_python="/opt/vllm/bin/python")
    specs = plan(named)
    assert {spec.name: spec.argv[0] for spec in specs if spec.argv[0] != sys.executable} == {
        "inference": "/opt/vllm/bin/python"
    }
    with pytest.raises(ConfigError, match=r"cluster\.inference_python: /opt/vllm/bin/python is no"):
        inference_python(named, "torch")
    python.chmod(0o755)
    assert inference_python(ClusterConfig(inference_python=str(python)), "torch") == str(python)


def test_every_service_reaches_the_receiver_of_traces_as_the_environment_says(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given = {
        "OTEL_EXPORTER_OTLP_CLIENT_KEY": "/keys/client.pem",
        "OTEL_EXPORTER_OTLP_TRACES_HEADERS": "key=1",
        "HTTPS_PROXY": "http://proxy:3128",
        "REQUESTS_CA_BUNDLE": "/keys/ca.pem",
    }
    elsewhere = "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"
    for name, value in {**given, elsewhere: "https://elsewhere"}.items():
        monkeypatch.setenv(name, value)
    connection = ServerAddresses("nats://here", "redis://here", PASSWORDS)
    site = Site(Path("config.yaml"), Path("state"), connection, 1, otlp_endpoint="https://collector")
    config = ClusterConfig(num_sandboxes=1, tool_workers=("mine:add",))
    for spec in (*tool_worker_specs(config, "run", site), *service_specs(config, 1, site)):
        assert given.items() <= spec.env.items(), spec.name
        assert spec.env["OTEL_EXPORTER_OTLP_ENDPOINT"] == "https://collector", spec.name
        assert elsewhere not in spec.env, spec.name


def test_an_endpoint_of_traces_alone_is_one_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OTEL_EXPORTER_OTLP_ENDPOINT", raising=False)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "https://collector/v1/traces")
    assert TracingArgs().resolved_endpoint == "https://collector/v1/traces"
    assert TracingArgs(endpoint="http://own:4318").resolved_endpoint == "http://own:4318"
