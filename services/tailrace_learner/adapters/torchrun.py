"""The learner's ranks as child processes, started and watched by torchrun's elastic agent.

The process that the supervisor knows becomes the agent: it ends when any rank ends, and takes the
others with it. A rank never outlives it: the kernel kills the ranks of a killed agent. Exit codes pass
through: 2 (the user's mistake) stays 2; a rank that was killed makes it 1.
"""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import sys
from collections.abc import Sequence

from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from tailrace.log import get_logger
from tailrace_learner.config_execution import StrategyArgs

log = get_logger(__name__)

_PR_SET_PDEATHSIG = 1
_EXIT_FAILED = 1
_EXIT_CONFIG = 2


def run_ranks(args: StrategyArgs, module: str, argv: Sequence[str]) -> int:
    """Run `python -m module *argv` as `num_ranks` ranks until one ends; the exit code of them all."""
    _silence_agent()
    launch = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=args.num_ranks,
        rdzv_backend="c10d",
        rdzv_endpoint="127.0.0.1:0",
        max_restarts=0,
        monitor_interval=0.2,
        local_addr="127.0.0.1",
    )
    try:
        elastic_launch(launch, sys.executable)("-m", module, *argv)
    except ChildFailedError as error:
        return _exit_code(error)
    except SignalException:  # told to end: the ranks drained
        return 0
    return 0


def die_with_agent() -> None:
    """In a rank: have the kernel kill this process when the agent dies."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() == 1:
        os.kill(os.getpid(), signal.SIGKILL)


def _exit_code(error: ChildFailedError) -> int:
    codes = {rank: failure.exitcode for rank, failure in error.failures.items()}
    if _EXIT_CONFIG in codes.values():
        return _EXIT_CONFIG  # the rank has said why, in the last line
    log.error("ranks ended", exit_codes=codes)
    return _EXIT_FAILED


def _silence_agent() -> None:
    """The agent's own reports would hide what the ranks say."""
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    logging.getLogger("torch.distributed.run").setLevel(logging.CRITICAL)
