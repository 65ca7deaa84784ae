"""Learner on two nodes, as two processes of this machine."""

from __future__ import annotations

import signal
from collections.abc import Sequence

from tests.world.processes import ServiceProcess


def node_environment(name: str, port: int) -> dict[str, str]:
    """Variables of the node whose pod has this name (`learner-1`); the first one listens at `port`."""
    return {
        "TAILRACE_NUM_NODES": "2",
        "TAILRACE_NODE_RANK": name,
        "TAILRACE_MASTER": f"127.0.0.1:{port}",
        "TAILRACE_ADVERTISE_HOST": "127.0.0.1",
    }


def stop_at_once(processes: Sequence[ServiceProcess], deadline_s: float) -> list[int]:
    """SIGTERM to all at the same time, however late this process runs; returns their exit codes.

    A node whose ranks have ended before it is told to end itself ends in failure.
    """
    for number in (signal.SIGSTOP, signal.SIGTERM, signal.SIGCONT):
        for process in processes:
            process.running.send_signal(number)
    return [process.ended(deadline_s) for process in processes]
