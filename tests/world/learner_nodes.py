"""Learner on two nodes, as two processes of this machine."""

from __future__ import annotations


def node_environment(name: str, port: int) -> dict[str, str]:
    """Variables of the node whose pod has this name (`learner-1`); the first one listens at `port`."""
    return {
        "TAILRACE_NUM_NODES": "2",
        "TAILRACE_NODE_RANK": name,
        "TAILRACE_MASTER": f"127.0.0.1:{port}",
        "TAILRACE_ADVERTISE_HOST": "127.0.0.1",
    }
