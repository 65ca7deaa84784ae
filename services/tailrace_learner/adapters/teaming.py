"""How a process becomes the learner's only worker, the first rank of a team, or one of its mirrors.

Also what several ranks need of their host.
"""

from __future__ import annotations

import os
import signal
import sys

import torch

from tailrace import log as logging
from tailrace.config import ConfigError, RunConfig
from tailrace.log import get_logger
from tailrace_learner.adapters.hf_model import pick_device
from tailrace_learner.adapters.ranks import TorchRanks, check_launch, launched_rank
from tailrace_learner.adapters.strategies.base import Strategy
from tailrace_learner.adapters.strategies.deepspeed import DeepspeedStrategy
from tailrace_learner.adapters.strategies.fsdp2 import Fsdp2Strategy
from tailrace_learner.adapters.strategies.megatron import MegatronStrategy
from tailrace_learner.adapters.strategies.single import SingleStrategy
from tailrace_learner.adapters.strategies.zero3 import Zero3Strategy
from tailrace_learner.adapters.team import Team, follow
from tailrace_learner.adapters.torchrun import die_with_agent
from tailrace_learner.adapters.worker import Worker
from tailrace_learner.config import LearnerConfig

log = get_logger(__name__)


def ready_host(config: LearnerConfig) -> None:
    """What several ranks need of this process's host before anything touches a GPU; a launcher's ranks
    inherit it. `ConfigError` if there are more of them than GPUs."""
    device = pick_device(config)
    if device.type == "cuda":
        check_gpus(config.strategy_args.num_ranks, torch.cuda.device_count())
    for name, value in rank_environment(config.strategy_args.resolved_name, device.type).items():
        os.environ.setdefault(name, value)


def check_gpus(num_ranks: int, num_gpus: int) -> None:
    """Raise `ConfigError` unless every rank can have a GPU of its own."""
    if num_ranks > num_gpus:
        raise ConfigError(
            f"learner.strategy_args.num_ranks is {num_ranks}, but the learner sees {num_gpus} GPU(s); "
            "two ranks cannot share one: list more in cluster.learner_gpus, or lower num_ranks"
        )


def rank_environment(strategy_name: str, device_type: str) -> dict[str, str]:
    """Variables that a strategy's package reads when CUDA starts or it is imported."""
    if strategy_name == "megatron":
        # megatron-core warns without it; on CUDA it orders communication before computation.
        return {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    if strategy_name == "deepspeed" and device_type == "cpu":
        return {"DS_ACCELERATOR": "cpu"}  # else it takes any GPU that it sees
    return {}


def gather_team(run: RunConfig, config: LearnerConfig) -> Worker | Team:
    """What trains: a worker alone, or (in rank 0) all ranks, once every one of them is there."""
    if launched_rank() is None:
        return Worker(run, config, SingleStrategy())
    ranks = _join(config)
    return Team(Worker(run, config, _strategy(ranks, config)), ranks)


def join_team(run: RunConfig, config: LearnerConfig, instance_id: str) -> int:
    """Mirror rank 0 until it ends; the exit code."""
    # The launcher ends all ranks at once; rank 0 needs us until it has drained, and then says so.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    logging.configure(run=run.exp_name, instance_id=f"{instance_id}-r{launched_rank()}")
    logging.bind(service="learner")
    torch.set_num_threads(config.num_threads)
    ranks = _join(config)
    follow(Worker(run, config, _strategy(ranks, config)), ranks)
    return 0


def leave(exit_code: int) -> int:
    """End a rank at once: its threads may wait for ranks that are gone. Other processes go on."""
    if launched_rank() is not None:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(exit_code)
    return exit_code


def _join(config: LearnerConfig) -> TorchRanks:
    die_with_agent()
    check_launch(config.strategy_args)
    device = pick_device(config)
    if device.type == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    ranks = TorchRanks(config.strategy_args, device)
    log.info("rank joined", rank=ranks.rank, num_ranks=ranks.num_ranks)
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
            return SingleStrategy()
