"""Run a function on several real gloo ranks: forked children, which need not import torch again."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import torch

from tailrace_learner.adapters.ranks import TorchRanks
from tailrace_learner.config_execution import StrategyArgs
from tests.world.servers import free_port

TIMEOUT_S = 200.0  # a busy machine lets ranks wait for each other at every collective


def on_ranks(
    num_ranks: int, work: Callable[..., Any], *args: Any, timeout_s: float = TIMEOUT_S
) -> list[Any]:
    """Results of `work(ranks, *args)` on each rank; ranks wait `timeout_s` for each other."""
    strategy = StrategyArgs(num_ranks=num_ranks, timeout_s=timeout_s)
    context = multiprocessing.get_context("fork")
    port = free_port()
    pipes = [context.Pipe(duplex=False) for _ in range(num_ranks)]
    children = [
        context.Process(target=_child, args=(rank, strategy, port, pipe[1], work, args), daemon=True)
        for rank, pipe in enumerate(pipes)
    ]
    for child in children:
        child.start()
    try:
        return [_result(pipe[0], rank) for rank, pipe in enumerate(pipes)]
    finally:
        for child in children:
            child.kill()
            child.join()


def _result(pipe: Connection, rank: int) -> Any:
    assert pipe.poll(TIMEOUT_S), f"rank {rank} says nothing"
    is_good, result = pickle.loads(pipe.recv_bytes())
    assert is_good, f"rank {rank}:\n{result}"
    return result


def _child(
    rank: int, strategy: StrategyArgs, port: int, pipe: Connection, work: Callable[..., Any], args: Any
) -> None:
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(strategy.num_ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    torch.set_num_threads(1)
    try:
        ranks = TorchRanks(strategy, torch.device("cpu"))
        pipe.send_bytes(pickle.dumps((True, work(ranks, *args))))
    except BaseException:  # noqa: BLE001 - told to the test
        pipe.send_bytes(pickle.dumps((False, traceback.format_exc())))
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()  # it kills this process once all ranks are done: others may need what this one serves
    os._exit(0)
