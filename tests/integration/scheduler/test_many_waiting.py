"""The scheduler with 100,000 episodes that wait and 10,000 that are played, on real NATS and Redis."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import NamedTuple

import msgspec
import psutil
import pytest

from tailrace.bus import Bus
from tailrace.config import Endpoints
from tailrace.store import StoreConnection
from tailrace_protos import subjects
from tailrace_protos.control import AgentActivity, ServerStatus
from tailrace_protos.episode import EpisodeTask, Outcome
from tests.integration.scheduler.fakes import FakeAgents, FakeRun, FakeServer, made_trajectory
from tests.world.consumer import consume

PLAYED, GROUP_SIZE, REPLACED, WAITING = 10_000, 16, 5_000, (10_000, 100_000)


class FakeLargeServer(FakeServer):
    """Has room for `PLAYED` episodes."""

    def status(self) -> ServerStatus:
        status = super().status()
        return msgspec.structs.replace(status, max_running=PLAYED // 2, capacity_tokens=1 << 32)


class FakeHoldingAgents(FakeAgents):
    """Plays training episodes until it is told to settle them."""

    async def work(self, phase: subjects.Phase) -> None:
        if phase == "eval":
            await super().work(phase)
        stream = subjects.episodes_stream(self._run)
        while True:
            messages = await consume(self._bus, stream, phase, EpisodeTask, 512, 0.5)
            if messages:
                await self._lease([task for task, _ in messages])
                for task, ack in messages:  # the lease says from here on who plays it
                    self.held.append(task)
                    await ack()

    async def tell(self) -> None:
        while True:
            activity = AgentActivity(
                self.worker_id, len(self.held), 0, 0, 0, time.time(), context_limit=64
            )
            await self._bus.publish(subjects.activity(self._run), activity)
            await asyncio.sleep(0.1)

    async def settle(self, num_episodes: int) -> None:
        for start in range(0, num_episodes, 500):
            ended = self.held[start : start + 500]
            await asyncio.gather(
                *(self._buffer.put_trajectory(made_trajectory(task, Outcome.OK)) for task in ended)
            )
        del self.held[:num_episodes]


class Memory(NamedTuple):
    """Resident bytes of the scheduler."""

    full: int  # once all groups are admitted and the server is full
    later: int  # when half of the episodes were replaced, twice


async def memory_with(run: FakeRun, num_groups: int) -> Memory:
    """Memory of a run that has admitted its groups."""
    agents = FakeHoldingAgents(run.bus, run.store, run.run)
    run.agents, run.server = agents, FakeLargeServer(run.bus, run.run)
    run.learner._server = run.server
    async with run:
        process = psutil.Process(run.scheduler.running.pid)

        def is_full() -> bool:
            return len(agents.held) == PLAYED

        await run.learner.begin()
        await run.until(lambda: run.statuses[-1].num_groups_running == num_groups, within_s=300.0)
        await run.until(is_full, within_s=300.0)
        full = process.memory_info().rss
        for _ in range(2):
            await agents.settle(REPLACED)
            await run.until(is_full, within_s=300.0)
        return Memory(full, process.memory_info().rss)


@pytest.mark.heavy
@pytest.mark.timeout(900)
async def test_a_waiting_episode_costs_the_scheduler_less_than_a_kilobyte(
    endpoints: Endpoints, redis: StoreConnection, tmp_path: Path, run_name: str
) -> None:
    memories = {}
    for num_waiting in WAITING:
        num_groups, name = (PLAYED + num_waiting) // GROUP_SIZE, f"{run_name}-{num_waiting}"
        bus = await Bus.connect(endpoints, name="test", run=name)
        sizes = {"group_size": GROUP_SIZE, "groups_per_step": num_groups}
        run = FakeRun(endpoints, bus, redis, tmp_path, name, max_staleness=0, **sizes)
        memories[num_waiting] = await memory_with(run, num_groups)
        await bus.close()
    least, most = memories[WAITING[0]], memories[WAITING[-1]]
    assert (most.full - least.full) / (WAITING[-1] - WAITING[0]) < 1000, memories
    assert all(one.later < 1.1 * one.full for one in memories.values()), memories
