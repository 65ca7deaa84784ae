"""Processes of a local cluster, with their arguments and environment (pure)."""

import os
import sys
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

from tailrace.config import ConfigError
from tailrace.import_path import module_options, python_path
from tailrace.runtime.service import READY_FILE
from tailrace.tracing import SALT_VARIABLE
from tailrace_cli.cluster.placement import GpuPlacement, given_gpus
from tailrace_cli.cluster.servers import ServerAddresses, connection_environment, given_binary
from tailrace_cli.config import ClusterConfig
from tailrace_protos.subjects import SERVICES

# What a child keeps of our environment; everything else it gets is written here or, for those that run
# the user's own code, named in `cluster.keep_environment`.
KEPT_ENVIRONMENT = (
    "PATH", "HOME", "LANG", "LC_ALL", "LC_CTYPE", "TMPDIR", "TZ", "USER", "LOGNAME", "VIRTUAL_ENV",
    "CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES", "LD_LIBRARY_PATH", "TAILRACE_LOG_LEVEL",
    # Where Python finds packages, and where it and libraries keep what they have made.
    "PYTHONPATH", "PYTHONHOME", "PYTHONUSERBASE", "PYTHONNOUSERSITE", "PYTHONSAFEPATH",
    "PYTHONPYCACHEPREFIX", "XDG_CACHE_HOME",
)  # fmt: skip
KEPT_FOR_TRACES = ("OTEL_EXPORTER_OTLP_", "OTEL_RESOURCE_ATTRIBUTES")  # by the beginning of their names
_TRACES_ENDPOINT = "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"
# Of the way to addresses elsewhere: proxy, certificates.
KEPT_FOR_HTTP = (
    "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "http_proxy", "https_proxy", "all_proxy", "SSL_CERT_FILE",
    "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE",
)  # fmt: skip
# Of models and data sets elsewhere: mirror, cache, token; by the beginning of their names.
KEPT_FOR_DOWNLOADS = ("HF_", "HUGGINGFACE_", "HUGGING_FACE_", "TRANSFORMERS_")
DOWNLOAD = ("learner", "inference", "agents", "reward", "tools")
# Of CUDA and of the libraries that compute and send on GPUs, by the beginning of their names.
KEPT_FOR_GPUS = (
    "CUDA_HOME", "CUDA_DEVICE_ORDER", "CUDA_CACHE_PATH", "PYTORCH_CUDA_ALLOC_CONF",
    "PYTORCH_ALLOC_CONF", "NCCL_", "TORCH_NCCL_", "TORCH_EXTENSIONS_DIR", "TORCHINDUCTOR_", "TRITON_",
    "VLLM_", "SGLANG_",
)  # fmt: skip
ON_GPUS = ("learner", "inference", "weight_sync", "reward")
_HERE = ("127.0.0.1", "localhost", "0.0.0.0")  # where services call each other: never by a proxy
ENGINE_PACKAGES = ("vllm", "sglang")  # engines that need an environment with a package of their name
RUN_USER_CODE = ("agents", "reward", "tools")
# Of trackers, object stores and containers, for the services that call them, by the beginning of their
# names. Code of a user's reward needs no key of a store.
KEPT_FOR_PACKAGES = {
    "learner": (
        *("MLFLOW_", "TRACKIO_", "WANDB_"),
        *("AWS_", "AZURE_STORAGE_", "GOOGLE_APPLICATION_CREDENTIALS", "FSSPEC_"),
    ),
    "agents": ("MLFLOW_",),
    "sandbox": ("DOCKER_", "KUBECONFIG"),
}


@dataclass(frozen=True)
class ProcessSpec:
    """One supervised process."""

    name: str  # unique: log file, status line
    argv: list[str]
    env: dict[str, str] = field(default_factory=dict)
    ready_file: Path | None = None  # made by the process when it is ready; None: it makes none


@dataclass(frozen=True)
class Site:
    """Values that every process of a cluster gets."""

    config_path: Path
    state_dir: Path
    connection: ServerAddresses
    num_threads: int
    gateway_port: int = 0  # that all gateways listen on
    user_modules: Path | None = None  # folder of the modules that the experiment names
    gateway_admin_key: str = ""  # opens their sessions
    otlp_endpoint: str = ""  # to which every process, tool workers too, sends its spans
    trace_salt: str = field(default_factory=lambda: uuid.uuid4().hex[:8])  # of this start
    placement: GpuPlacement | None = None  # None: by the numbers of the section `cluster` alone


def service_specs(config: ClusterConfig, num_gateways: int, site: Site) -> list[ProcessSpec]:
    """Every service process of the cluster, in the order in which they are started."""
    counts = {
        "weight_sync": 1,
        "learner": 1,
        "inference": config.num_inference_servers,
        "scheduler": 1,
        "reward": config.num_reward_workers,
        "sandbox": config.num_sandboxes,
        "gateway": num_gateways,
        "agents": config.num_agents_workers,
        "autoscaler": 0,  # of Kubernetes alone
    }
    counts |= {service: 1 for service in SERVICES if service not in counts}
    return [
        _service_spec(service, index, count, site, config)
        for service, count in counts.items()
        for index in range(count)
    ]


def tool_worker_specs(config: ClusterConfig, run: str, site: Site) -> list[ProcessSpec]:
    """The processes that serve the experiment's own tools, to this run."""
    env = service_environment("tools", site, config)
    env |= connection_environment("tools", site.connection)
    argv = [sys.executable, *module_options(env), "tailrace_cli", "tools", "serve", "--run", run]
    return [
        _spec(f"tools-{index}", [*argv, *tools.split()], env, site)
        for index, tools in enumerate(config.tool_workers)
    ]


def _spec(name: str, argv: list[str], env: Mapping[str, str], site: Site) -> ProcessSpec:
    """A process that says when it is ready."""
    ready_file = site.state_dir / "ready" / name
    return ProcessSpec(name, argv, {**env, READY_FILE: str(ready_file)}, ready_file)


def _service_spec(
    service: str, index: int, count: int, site: Site, config: ClusterConfig
) -> ProcessSpec:
    instance = f"{service}-{index}" if count > 1 else service
    python = config.inference_python if service == "inference" else ""
    env = service_environment(service, site, config)
    argv = [python or sys.executable, *module_options(env), "tailrace.start", f"tailrace_{service}"]
    argv += ["--config", str(site.config_path), "--instance-id", instance]
    placement = given_gpus(config) if site.placement is None else site.placement
    gpus = _gpus_of(service, index, config, placement)
    env |= gpu_environment(gpus, config, env.get("CUDA_VISIBLE_DEVICES"))
    if service == "gateway":
        env["TAILRACE_GATEWAY_PORT"] = str(site.gateway_port)
        env["TAILRACE_GATEWAY_ADMIN_KEY"] = site.gateway_admin_key
    return _spec(instance, argv, env | connection_environment(service, site.connection), site)


def service_environment(service: str, site: Site, config: ClusterConfig) -> dict[str, str]:
    """Environment of a process aside from addresses; user code alone gets the user's variables."""
    env = {key: os.environ[key] for key in _kept(service, site, config) if key in os.environ}
    env |= without_proxy(env)
    env |= {
        "PYTHONUNBUFFERED": "1",
        "OMP_NUM_THREADS": str(site.num_threads),
        "TOKENIZERS_PARALLELISM": "false",
        "TQDM_DISABLE": "1",
        "TAILRACE_STATE_DIR": str(site.state_dir),
        "TAILRACE_METRICS_PORT": "0",
        SALT_VARIABLE: site.trace_salt,
        "TAILRACE_LOG": "json",
    }
    if site.otlp_endpoint:
        env["OTEL_EXPORTER_OTLP_ENDPOINT"] = site.otlp_endpoint
        env.pop(_TRACES_ENDPOINT, None)  # it would come first
    if site.user_modules is not None:
        env["PYTHONPATH"] = python_path(site.user_modules, env.get("PYTHONPATH", ""))
    return env


def _kept(service: str, site: Site, config: ClusterConfig) -> tuple[str, ...]:
    """Names of the variables that a process has from the one that starts it."""
    kept = KEPT_ENVIRONMENT + (config.keep_environment if service in RUN_USER_CODE else ())
    kept += KEPT_FOR_HTTP if service in DOWNLOAD or site.otlp_endpoint else ()
    prefixes = KEPT_FOR_TRACES + (KEPT_FOR_GPUS if service in ON_GPUS else ())
    prefixes += KEPT_FOR_DOWNLOADS if service in DOWNLOAD else ()
    prefixes += KEPT_FOR_PACKAGES.get(service, ())
    return kept + tuple(key for key in os.environ if key.startswith(prefixes))


def without_proxy(env: Mapping[str, str]) -> dict[str, str]:
    """Variables that name the addresses to which no proxy leads: the user's, and those of this machine.

    There are none where `env` names no proxy.
    """
    if not any(key.lower().endswith("_proxy") for key in env):
        return {}
    given = os.environ.get("NO_PROXY") or os.environ.get("no_proxy", "")
    addresses = ",".join(filter(None, (given, *_HERE)))
    return {"NO_PROXY": addresses, "no_proxy": addresses}


def inference_python(config: ClusterConfig, engine: str) -> str:
    """Interpreter of the inference servers; `ConfigError` if none has the engine's package."""
    if config.inference_python:
        return given_binary(config.inference_python, "cluster.inference_python")
    if engine not in ENGINE_PACKAGES or find_spec(engine) is not None:
        return sys.executable
    folders = (Path.cwd(), Path(sys.prefix).parent)
    found = [folder / f".venv-{engine}" / "bin" / "python" for folder in folders]
    for python in found:
        if python.exists():
            return str(python)
    raise ConfigError(
        f"inference.engine {engine}: this environment has no package {engine}: run "
        f"`make .venv-{engine}/ready`, or name an interpreter with {engine} and tailrace in "
        "cluster.inference_python"
    )


def check_gpus(config: ClusterConfig, visible: str | None) -> None:
    """Raise `ConfigError` for GPUs that the run names and that are not shown to it.

    `visible` is `CUDA_VISIBLE_DEVICES` as this process has it; None: every GPU is shown.
    """
    if visible is None:
        return
    named: dict[str, Sequence[int]] = {
        f"cluster.{key}": getattr(config, key)
        for key in ("learner_gpus", "inference_gpus", "reward_gpus")
    }
    named["cluster.num_gpus_per_node"] = range(config.num_gpus_per_node or 0)
    num_shown = len(_shown(visible))
    for key, gpus in named.items():
        if gpus and max(gpus) >= num_shown:
            raise ConfigError(
                f"{key} asks for GPU {max(gpus)}, counted from 0, and CUDA_VISIBLE_DEVICES={visible!r} "
                f"shows {num_shown}: show more of them, or name fewer"
            )


def _shown(visible: str) -> list[str]:
    """The GPUs of CUDA's variable, which ends at the first one that cannot be."""
    names = [name.strip() for name in visible.split(",")]
    ends = (place for place, name in enumerate(names) if not name or name.startswith("-"))
    return names[: next(ends, None)]


def gpu_environment(
    gpus: Sequence[int] | None, config: ClusterConfig, visible: str | None
) -> dict[str, str]:
    """GPUs visible to a process, of those that this process sees (`visible`, as in `check_gpus`)."""
    if gpus is None:
        return {}
    check_gpus(config, visible)
    names = None if visible is None else _shown(visible)
    return {"CUDA_VISIBLE_DEVICES": ",".join(names[gpu] if names else str(gpu) for gpu in gpus)}


def _gpus_of(
    service: str, index: int, config: ClusterConfig, placement: GpuPlacement
) -> Sequence[int] | None:
    """Numbers of a process's GPUs; None: whatever there is."""
    placed: Sequence[int] = ()
    if service == "learner":
        placed = placement.learner
    elif service == "inference":
        placed = placement.of_server(index)
    elif service == "reward" and config.reward_gpus:
        placed = (config.reward_gpus[index % len(config.reward_gpus)],)
    if placed:
        return placed
    return None if config.num_gpus_per_node is None else range(config.num_gpus_per_node)
