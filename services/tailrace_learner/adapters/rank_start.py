"""Start of a learner's computation: one worker alone, or rank 0 with its mirrors.

A rank never outlives the agent that launched it: the kernel kills the ranks of a killed agent.
"""

import ctypes
import os
import signal

import torch
from prometheus_client import start_http_server

from tailrace import log as tailrace_log
from tailrace.config import RunConfig
from tailrace.log import get_logger
from tailrace_learner.adapters.rank_controller import RankController, follow
from tailrace_learner.adapters.ranks import (
    AGENT_PID,
    TorchRanks,
    check_launch,
    launched_rank,
    pick_device,
)
from tailrace_learner.adapters.strategies.base import Strategy
from tailrace_learner.adapters.strategies.deepspeed import DeepspeedStrategy, Zero3Strategy
from tailrace_learner.adapters.strategies.fsdp2 import Fsdp2Strategy
from tailrace_learner.adapters.strategies.megatron import MegatronStrategy
from tailrace_learner.adapters.worker import Worker
from tailrace_learner.config import LearnerConfig
from tailrace_protos.base import encode_json

log = get_logger(__name__)

_PR_SET_PDEATHSIG = 1


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


def die_with_agent() -> None:
    """Have the kernel kill this rank when the agent dies."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    # It may be dead already: another process is the parent then. In a container the agent has the id 1.
    if os.environ.get(AGENT_PID, str(os.getppid())) != str(os.getppid()):
        os.kill(os.getpid(), signal.SIGKILL)
