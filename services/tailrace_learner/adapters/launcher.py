"""Launcher of a learner's ranks: torchrun's elastic agent, one on each node.

With several ranks the process that the supervisor knows becomes an agent. It ends when any rank ends,
and ends the others; agents of other nodes end with it (`nodes.py`). Exit codes pass through: 2 (a
user's mistake) stays 2; a killed rank makes it 1. It computes nothing, and imports nothing that
computes: that would take seconds, and memory on each node.
"""

import logging
import math
import os
import sys
from collections.abc import Sequence

import torch
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from tailrace.config import ConfigError, advertised_host
from tailrace.import_path import module_options
from tailrace.log import get_logger
from tailrace.runtime import Args
from tailrace.runtime.service import CLOSE_TIMEOUT_S
from tailrace_learner.adapters.nodes import MEETING_S, Nodes, NodeWatch, end_when_told
from tailrace_learner.adapters.ranks import AGENT_PID, pick_device
from tailrace_learner.config import LearnerConfig, check_with_run
from tailrace_learner.config_execution import StrategyArgs

log = get_logger(__name__)

_EXIT_FAILED = 1
_EXIT_CONFIG = 2


def checked_config(args: Args) -> LearnerConfig:
    """Returns the learner's section, checked together with the run's keys."""
    config = args.section("learner", LearnerConfig)
    try:
        check_with_run(config, args.run)
    except ValueError as error:
        raise ConfigError(f"{args.config}: {error}") from error
    if args.run.colocated and (num_nodes := Nodes.from_env().num) > 1:
        raise ConfigError(
            f"{args.config}: colocated: the learner takes turns with servers of one machine, and it "
            f"has {num_nodes} nodes (TAILRACE_NUM_NODES): give it one, or set colocated: false"
        )
    return config


def ready_host(config: LearnerConfig) -> None:
    """Set the environment of several ranks before anything touches a GPU; the agent's ranks inherit it.

    `ConfigError` if there are more ranks than GPUs.
    """
    device = pick_device(config)
    if device.type == "cuda":
        check_gpus(Nodes.from_env().ranks_of(config.strategy_args), torch.cuda.device_count())
    for name, value in rank_environment(config.strategy_args.resolved_name, device.type).items():
        os.environ.setdefault(name, value)


def check_gpus(num_ranks: int, num_gpus: int) -> None:
    """Raise `ConfigError` if ranks would have to share a GPU."""
    if num_ranks > num_gpus:
        raise ConfigError(
            f"learner.strategy_args.num_ranks is {num_ranks}, but the learner sees {num_gpus} GPU(s); "
            "two ranks cannot share one: list more in cluster.learner_gpus, or lower num_ranks"
        )


def rank_environment(strategy_name: str, device_type: str) -> dict[str, str]:
    """Returns the variables that a strategy's package reads at its import or when CUDA starts."""
    if strategy_name == "megatron":
        # megatron-core warns without it; on CUDA it orders communication before computation.
        return {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    if strategy_name == "deepspeed" and device_type == "cpu":
        return {"DS_ACCELERATOR": "cpu"}  # otherwise it takes any GPU that it sees
    return {}


def run_ranks(args: StrategyArgs, drain_s: float, module: str, argv: Sequence[str]) -> int:
    """Run `python -m module *argv` as `num_ranks` ranks until one ends; returns the exit code.

    At a stop they have `drain_s` seconds, and a little more, to end by themselves.
    """
    _silence_agent()
    nodes = Nodes.from_env()
    is_one = nodes.num == 1
    os.environ[AGENT_PID] = str(os.getpid())
    # Otherwise the agent kills the ranks 30 s after a signal, in the middle of a large checkpoint.
    os.environ["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] = str(math.ceil(drain_s + CLOSE_TIMEOUT_S))
    launch = LaunchConfig(
        min_nodes=nodes.num,
        max_nodes=nodes.num,
        run_id="learner",  # the same on all nodes: they meet under this name
        nproc_per_node=nodes.ranks_of(args),
        rdzv_backend="c10d" if is_one else "static",  # static: rank 0 is on the first node
        rdzv_endpoint=nodes.master,
        rdzv_configs={} if is_one else {"rank": nodes.rank, "timeout": MEETING_S},
        max_restarts=0,
        monitor_interval=0.2,
        local_addr="127.0.0.1" if is_one else advertised_host(),
    )
    watch = None
    if not is_one:
        # Torch sets it below. A new variable moves the environment, which the watch's thread may read.
        os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = launch.signals_to_handle
        told = end_when_told()
        log.info("waits for the other nodes", node=nodes.rank, num_nodes=nodes.num, master=nodes.master)
        watch = NodeWatch(nodes, told)
    try:
        elastic_launch(launch, sys.executable)(*module_options(os.environ), module, *argv)
    except ChildFailedError as error:
        return _exit_code(error)
    except SignalException:  # a signal to end: the ranks have drained
        if watch is not None:
            watch.leave()
        return 0
    finally:
        if watch is not None:
            watch.end()
    return 0 if is_one else _EXIT_FAILED  # another node was told to end: this one must start again


def _exit_code(error: ChildFailedError) -> int:
    codes = {rank: failure.exitcode for rank, failure in error.failures.items()}
    if _EXIT_CONFIG in codes.values():
        return _EXIT_CONFIG  # the rank printed the reason as its last line
    log.error("ranks ended", exit_codes=codes)
    return _EXIT_FAILED


def _silence_agent() -> None:
    """Silence the agent: its reports would hide the messages of the ranks."""
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    logging.getLogger("torch.distributed.run").setLevel(logging.CRITICAL)
