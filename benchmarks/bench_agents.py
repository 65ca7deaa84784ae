"""CPU of one agents worker per turn: thousands of FrozenLake episodes, a policy that answers at once.

    python benchmarks/bench_agents.py [--episodes 4000] [--concurrent 512]

`core` plays episodes with a journal and a policy that cost nothing: environment, rendering, buffers,
trajectory. `policy` adds leases, continuation and requests (a client that answers in the next tick).
The transport, Redis and the queue are measured by their own benchmarks.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import uvloop

from tailrace.channel.generation import Generation
from tailrace.channel.ports import Address
from tailrace.chat import Renderer
from tailrace.policy.activity import Stages
from tailrace.policy.continuation import ContinuingPolicy
from tailrace.sdk.policy import Policy, TurnRequest
from tailrace_agents.core.environments import EnvPool
from tailrace_agents.core.episode import EpisodeLimits, SamplingPlan
from tailrace_agents.core.play import play_episode
from tailrace_envs import make_env
from tailrace_envs.frozen_lake_tokenizer import build_frozen_lake_tokenizer
from tailrace_protos.generation import FinishReason, SamplingParams, TokenSpan
from tailrace_protos.weights import ModelCard

LIMITS = EpisodeLimits(8192, 4096, 64, wall_clock_s=600.0)


class InstantPolicy:
    """Says directions in turn."""

    def __init__(self, renderer: Renderer) -> None:
        logprobs = np.full(2, -0.1, np.float32)
        replies = [renderer.reply_ids(word) for word in ("Right", "Down", "Left", "Up")]
        self._answers = itertools.cycle(
            [
                Generation(ids, logprobs, (TokenSpan(1, "", 2),), FinishReason.STOP, None, 0)
                for ids in replies
            ]
        )

    def next(self) -> Generation:
        """The next reply."""
        return next(self._answers)

    async def generate(self, request: TurnRequest) -> Generation:
        """The next reply, after a turn of the loop."""
        await asyncio.sleep(0)
        return next(self._answers)


class InstantCall:
    """A call that is answered in the next tick."""

    def __init__(self, answer: Generation) -> None:
        self._answer = answer

    async def collect(self) -> Generation:
        """The answer."""
        await asyncio.sleep(0)
        return self._answer


class InstantWorld:
    """`Placement` and `GenerateClient` without a network."""

    def __init__(self, policy: InstantPolicy) -> None:
        self._policy = policy

    async def lease(self, *args: Any) -> Address:
        """The only server."""
        return Address("s0")

    def report_call(self, *args: Any) -> None:
        """Nobody counts."""

    def release(self, episode_id: str) -> None:
        """Nobody counts."""

    def generate(self, *args: Any) -> Any:
        """A call."""
        return InstantCall(self._policy.next())


async def play_all(renderer: Renderer, policy: Policy, num_episodes: int, num_concurrent: int) -> int:
    """Play the episodes; the number of turns they had."""
    pool = EnvPool(lambda: make_env("frozen_lake", {}))
    seeds = iter(range(num_episodes))
    sampling = SamplingPlan(SamplingParams(stop_token_ids=renderer.stop_token_ids))
    num_turns = 0

    async def play_some() -> None:
        nonlocal num_turns
        for seed in seeds:
            env = pool.take()
            result = await play_episode(
                env, renderer, policy, LIMITS, sampling, seed=seed % 1000, episode_id=f"g{seed}.0"
            )
            result.tokens.row()
            pool.give_back(env)
            num_turns += result.tokens.num_turns

    await asyncio.gather(*(play_some() for _ in range(num_concurrent)))
    return num_turns


def measure(
    name: str, make: Callable[[], Policy], renderer: Renderer, args: argparse.Namespace
) -> None:
    """Print a row."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(play_all(renderer, make(), 500, 100))
        started_s = time.process_time()
        num_turns = runner.run(play_all(renderer, make(), args.episodes, args.concurrent))
    cpu_s = time.process_time() - started_s
    us, rate = 1e6 * cpu_s / num_turns, num_turns / cpu_s
    print(f"{name:8} {us:7.1f} us/turn  {rate:9.0f} turns/s  ({num_turns} turns)")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--episodes", type=int, default=4000)
    parser.add_argument("--concurrent", type=int, default=512)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        build_frozen_lake_tokenizer(folder)
        files = {path.name: path.read_bytes() for path in Path(folder).iterdir()}
    renderer = Renderer.from_model_card(ModelCard(b"{}", files))
    measure("core", lambda: InstantPolicy(renderer), renderer, args)

    def full() -> Policy:
        world = InstantWorld(InstantPolicy(renderer))
        return ContinuingPolicy(world, world, Stages())  # type: ignore[arg-type]

    measure("policy", full, renderer, args)


if __name__ == "__main__":
    main()
