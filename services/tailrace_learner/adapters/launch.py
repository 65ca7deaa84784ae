"""Start of the learner's ranks: one worker alone, or rank 0 with its mirrors under torchrun's agent.

With several ranks the process that the supervisor knows becomes torchrun's elastic agent, one on each
node. It ends when any rank ends, and ends the others; agents of other nodes end with it (`nodes.py`). A
rank never outlives it: the kernel kills the ranks of a killed agent. Exit codes pass through: 2 (a
user's mistake) stays 2; a killed rank makes it 1.
"""

import ctypes
import logging
import math
import os
import signal
import sys
from collections.abc import Sequence

import torch
from prometheus_client import start_http_server
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from tailrace import log as tailrace_log
from tailrace.config import ConfigError, RunConfig, advertised_host
from tailrace.log import get_logger
from tailrace.runtime.service import CLOSE_TIMEOUT_S
from tailrace_learner.adapters.hf_model import pick_device
from tailrace_learner.adapters.nodes import MEETING_S, Nodes, NodeWatch, end_when_told
from tailrace_learner.adapters.rank_controller import RankController, follow
from tailrace_learner.adapters.ranks import TorchRanks, check_launch, launched_rank
from tailrace_learner.adapters.strategies.base import Strategy
from tailrace_learner.adapters.strategies.deepspeed import DeepspeedStrategy, Zero3Strategy
from tailrace_learner.adapters.strategies.fsdp2 import Fsdp2Strategy
from tailrace_learner.adapters.strategies.megatron import MegatronStrategy
from tailrace_learner.adapters.worker import Worker
from tailrace_learner.config import LearnerConfig
from tailrace_learner.config_execution import StrategyArgs
from tailrace_protos.base import encode_json

log = get_logger(__name__)

AGENT_PID = "TAILRACE_LEARNER_AGENT_PID"  # names the agent to its ranks
_PR_SET_PDEATHSIG = 1
_EXIT_FAILED = 1
_EXIT_CONFIG = 2


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


def gather_ranks(run: RunConfig, config: LearnerConfig) -> Worker:
    """Returns a worker alone, or in rank 0 the controller of all ranks once they have joined."""
    if launched_rank() is None:
        return Worker(run, config, Strategy())
    ranks = _join(run, config)
    return RankController(run, config, _strategy(ranks, config), ranks)


def join_ranks(run: RunConfig, config: LearnerConfig, instance_id: str) -> int:
    """Mirror rank 0 until it ends; returns the exit code."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    tailrace_log.configure(run=run.exp_name, instance_id=f"{instance_id}-r{launched_rank()}")
    tailrace_log.bind(service="learner")
    torch.set_num_threads(config.num_threads)
    if os.environ.get("LOCAL_RANK") == "0":
        _listen()  # rank 0 answers for the first node
    ranks = _join(run, config)  # the agent's signal ends this: rank 0 may have died, and never come
    # Then the agent signals all ranks at once; rank 0 needs us until it has drained, and tells us.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    follow(Worker(run, config, _strategy(ranks, config)), ranks)
    return 0


def _listen() -> None:
    """Serve the metrics of this node's first rank, at any path: a pod without rank 0 is probed here."""
    port = int(os.environ.get("TAILRACE_METRICS_PORT", "0"))
    if port:
        start_http_server(port, os.environ.get("TAILRACE_METRICS_HOST", "127.0.0.1"))


def leave(exit_code: int) -> int:
    """End a rank at once: its threads may wait for ranks that are gone. Other processes return."""
    if launched_rank() is not None:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(exit_code)
    return exit_code


def _join(run: RunConfig, config: LearnerConfig) -> TorchRanks:
    die_with_agent()
    check_launch(config.strategy_args)
    device = pick_device(config)
    if device.type == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    ranks = TorchRanks(config.strategy_args, device)
    log.info("rank joined", rank=ranks.rank, num_ranks=ranks.num_ranks)
    if len(set(ranks.collect(encode_json((run, config))))) > 1:
        raise RuntimeError(
            "ranks of the learner have different experiments: all end, and meet again. Remedy if that "
            "goes on: give every node the same file"
        )
    return ranks


def _strategy(ranks: TorchRanks, config: LearnerConfig) -> Strategy:
    args = config.strategy_args
    match args.resolved_name:
        case "fsdp2":
            return Fsdp2Strategy(ranks, pick_device(config))
        case "deepspeed" if args.zero_stage == 3:
            return Zero3Strategy(ranks, config.training_args)
        case "deepspeed":
            return DeepspeedStrategy(ranks, args.zero_stage, config.training_args)
        case "megatron":
            return MegatronStrategy(ranks, args)
        case _:
            return Strategy()


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
        elastic_launch(launch, sys.executable)("-m", module, *argv)
    except ChildFailedError as error:
        return _exit_code(error)
    except SignalException:  # a signal to end: the ranks have drained
        if watch is not None:
            watch.leave()
        return 0
    return 0 if is_one else _EXIT_FAILED  # another node was told to end: this one must start again


def die_with_agent() -> None:
    """Have the kernel kill this rank when the agent dies."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    # It may be dead already: another process is the parent then. In a container the agent has the id 1.
    if os.environ.get(AGENT_PID, str(os.getppid())) != str(os.getppid()):
        os.kill(os.getpid(), signal.SIGKILL)


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
