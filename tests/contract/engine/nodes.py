"""A follower of a server on several nodes, as a process of its own on this machine."""

from __future__ import annotations

import asyncio
import os
import sys

from tailrace_inference.adapters.node_link import Node
from tailrace_inference.adapters.vllm_follower import VllmFollower
from tailrace_inference.config import InferenceConfig
from tailrace_inference.ports import EngineFailedError
from tests.contract.engine.harness import TWO_NODES, make_card


async def follow() -> str:
    """Follows the leader that the environment names until the end of either."""
    config = InferenceConfig(engine="vllm", **TWO_NODES)  # type: ignore[arg-type]
    follower = VllmFollower(make_card(), config, Node.from_env(config.num_nodes, os.environ))
    try:
        await follower.start()
        sys.stdout.write(f"ready {follower._folder.path}\n")
        sys.stdout.flush()
        await follower.watch()
    except EngineFailedError as error:
        return str(error)
    finally:
        await follower.close()


if __name__ == "__main__":
    sys.stdout.write(f"ended: {asyncio.run(follow())}\n")
