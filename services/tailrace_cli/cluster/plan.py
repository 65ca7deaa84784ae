"""Which processes make a local cluster, with which arguments and environment (pure)."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tailrace_cli.config import ClusterConfig

# What a child keeps of our environment; everything else it gets is written here.
KEPT_ENVIRONMENT = (
    "PATH", "HOME", "LANG", "LC_ALL", "TMPDIR", "TZ", "USER", "VIRTUAL_ENV", "PYTHONPATH",
    "CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES", "LD_LIBRARY_PATH", "HF_HOME", "HF_TOKEN",
    "HF_HUB_OFFLINE", "OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_TRACES_SAMPLER_ARG", "TAILRACE_LOG_LEVEL",
)  # fmt: skip


@dataclass(frozen=True)
class ProcessSpec:
    """One supervised process."""

    name: str  # unique: log file, status line
    argv: list[str]
    env: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Connection:
    """How the services reach the two servers."""

    nats_url: str
    redis_url: str
    nats_passwords: Mapping[str, str]  # by user; empty: the URL carries what is needed


def service_specs(
    config: ClusterConfig, config_path: Path, state_dir: Path, connection: Connection
) -> list[ProcessSpec]:
    """Every service process of the cluster, in the order in which they are started."""
    counts = {
        "weight_sync": 1,
        "learner": 1,
        "inference": config.num_inference_servers,
        "scheduler": 1,
        "reward": config.num_reward_workers,
        "agents": config.num_agents_workers,
    }
    return [
        _service_spec(service, index, count, config, config_path, state_dir, connection)
        for service, count in counts.items()
        for index in range(count)
    ]


def _service_spec(
    service: str,
    index: int,
    count: int,
    config: ClusterConfig,
    config_path: Path,
    state_dir: Path,
    connection: Connection,
) -> ProcessSpec:
    instance = f"{service}-{index}" if count > 1 else service
    argv = [sys.executable, "-m", f"tailrace_{service}"]
    argv += ["--config", str(config_path), "--instance-id", instance]
    env = {key: os.environ[key] for key in KEPT_ENVIRONMENT if key in os.environ}
    env |= {
        "PYTHONUNBUFFERED": "1",
        "OMP_NUM_THREADS": str(config.num_threads),
        "TOKENIZERS_PARALLELISM": "false",
        "TQDM_DISABLE": "1",
        "TAILRACE_NATS_URL": connection.nats_url,
        "TAILRACE_REDIS_URL": connection.redis_url,
        "TAILRACE_STATE_DIR": str(state_dir),
        "TAILRACE_METRICS_PORT": "0",
        "TAILRACE_LOG": "json",
    }
    if connection.nats_passwords:
        env["TAILRACE_NATS_USER"] = service
        env["TAILRACE_NATS_PASSWORD"] = connection.nats_passwords[service]
    return ProcessSpec(instance, argv, env)
