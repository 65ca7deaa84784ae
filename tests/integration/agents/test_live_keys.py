"""Keys of the section `agents`: changing one changes what a worker does, over real NATS and Redis."""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from contextlib import AsyncExitStack
from typing import Any

import pytest

from tailrace.channel import ChunkSink
from tailrace.config import section_config
from tailrace_agents.adapters.workflow_pool import start_runner
from tailrace_agents.config import AgentsConfig
from tailrace_protos import subjects
from tailrace_protos.episode import Outcome
from tailrace_protos.generation import FinishReason, GenerateRequest, TokenChunk
from tailrace_protos.session import SessionOpened
from tests.unit.tailrace_agents.fakes import StairsEnv
from tests.world.agents import AgentsWorld, FakeServer
from tests.world.samples import sample
from tests.world.serving import eventually

ACCESS = SessionOpened("g0.0", "http://127.0.0.1:1/v1", "key-of-g0.0")


class Aborting(FakeServer):
    """Aborts every call without a token."""

    def submit(self, request: GenerateRequest, sink: ChunkSink) -> None:
        self.requests.append(request)
        sink.send(TokenChunk(request.call_id, finish_reason=FinishReason.ABORT))


class Crowded(StairsEnv):
    """Knows how many of its kind were in `reset` at once; the first ones wait until `awaited` are."""

    change = threading.Condition()
    awaited = 0
    num_inside = 0
    most = 0

    def reset(self, **names: Any) -> Any:
        cls = type(self)
        with cls.change:
            cls.num_inside += 1
            cls.most = max(cls.most, cls.num_inside)
            cls.change.notify_all()
            assert cls.change.wait_for(lambda: cls.most >= cls.awaited, 60.0)
        time.sleep(0.1)  # one more would come in
        with cls.change:
            cls.num_inside -= 1
        return super().reset(**names)


@pytest.mark.parametrize("greedy_baseline", [False, True])
async def test_greedy_baseline(world: AgentsWorld, greedy_baseline: bool) -> None:
    server = await world.start_server("s0")
    await world.start_agents(greedy_baseline=greedy_baseline)
    await world.admit(num_groups=2, group_size=2)
    await world.admit(num_groups=1, group_size=1, phase="eval")
    await world.settled(5)
    greedy = {request.episode_id for request in server.requests if request.sampling.temperature == 0}
    assert greedy == ({"train-0.0", "train-1.0"} if greedy_baseline else set())
    marked = {name for name, one in (await world.trajectories(2)).items() if one.is_greedy}
    assert marked == greedy


@pytest.mark.parametrize("seeded_rollouts", [False, True])
async def test_seeded_rollouts(world: AgentsWorld, seeded_rollouts: bool) -> None:
    server = await world.start_server("s0")
    await world.start_agents(seeded_rollouts=seeded_rollouts)
    await world.admit(num_groups=2, group_size=2)
    await world.settled(4)
    seeds = [request.sampling.seed for request in server.requests]
    assert len(set(seeds)) == (len(seeds) if seeded_rollouts else 1)
    assert (None in seeds) is not seeded_rollouts


@pytest.mark.parametrize("attempts", [1, 3])
async def test_max_generation_attempts(world: AgentsWorld, attempts: int) -> None:
    servers = [await world.start_server(server_id, kind=Aborting) for server_id in ("s0", "s1")]
    await world.start_agents(max_generation_attempts=attempts)
    await world.admit(num_groups=1, group_size=1)
    (event,) = (await world.settled(1)).values()
    assert event.outcome is Outcome.INFRA_FAILURE
    assert sum(len(server.requests) for server in servers) == attempts + 1


async def test_reward_timeout_s(world: AgentsWorld) -> None:
    """A request without an answer goes out again after this time."""
    await world.start_server("s0")
    world.rewards.free.clear()
    await world.start_agents(reward_timeout_s=0.1)
    await world.admit(num_groups=1, group_size=1)
    await eventually(lambda: len(world.rewards.requests) >= 2)
    world.rewards.free.set()
    (event,) = (await world.settled(1)).values()
    assert event.outcome is Outcome.OK


@pytest.mark.parametrize("max_deliveries", [1, 2])
async def test_max_deliveries(world: AgentsWorld, max_deliveries: int) -> None:
    server = await world.start_server("s0")
    await world.admit(num_groups=1, group_size=1)
    jetstream = world.service.bus.jetstream
    stream, dead = subjects.episodes_stream(world.run), subjects.dead_stream(world.run)
    queue = await jetstream.pull_subscribe_bind("train", stream)
    (taken,) = await queue.fetch(1, 5.0)
    await taken.nak()  # its worker had to let it go: the next delivery is the second
    await world.start_agents(max_deliveries=max_deliveries)

    async def num_dead() -> int:
        return int((await jetstream.stream_info(dead)).state.messages)

    async with asyncio.timeout(60):
        while not server.requests and not await num_dead():
            await asyncio.sleep(0.01)
    assert (bool(server.requests), await num_dead()) == (
        (False, 1) if max_deliveries == 1 else (True, 0)
    )


@pytest.mark.parametrize("env_threads", [1, 3])
async def test_env_threads(
    world: AgentsWorld, env_threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "crowded_envs", sys.modules[__name__])
    monkeypatch.setattr(Crowded, "most", 0)
    monkeypatch.setattr(Crowded, "awaited", env_threads)
    await world.start_server("s0")
    envs = {"lake": {"env_type": "crowded_envs:Crowded", "in_threads": True}}
    await world.start_agents(env_threads=env_threads, custom_envs=envs)
    await world.admit(num_groups=2, group_size=2)
    await world.settled(4)
    assert Crowded.most == env_threads


@pytest.mark.parametrize("frame_bytes", [1, 131072])
async def test_channel_frame_bytes(world: AgentsWorld, frame_bytes: int) -> None:
    """Calls of one moment share a frame, unless frames are full with one."""
    server = await world.start_server("s0")
    server.hold_from_turn = 0
    channel = {"frame_bytes": frame_bytes, "keepalive_s": 5.0}
    await world.start_agents(channel=channel, drain_s=0.1)
    num_before = frames_out()
    tasks = await world.admit(num_groups=1, group_size=32)
    await eventually(lambda: server.num_held == len(tasks))
    assert (frames_out() - num_before >= len(tasks)) == (frame_bytes == 1)


def frames_out() -> float:
    return sample("tailrace_channel_frames_total", side="client", direction="out")


class Looks:
    """A workflow whose reward says which library its client is of."""

    async def run(self, data: Any, http_client: Any) -> float:
        kinds = type(http_client).__mro__
        return float(any(kind.__module__.partition(".")[0] == "httpx2" for kind in kinds))


@pytest.mark.parametrize("library", ["httpx", "httpx2"])
async def test_workflow_http_library(library: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With `mode: subproc` it is looked at in `test_workflow_runners`."""
    monkeypatch.setitem(sys.modules, "looking_agents", sys.modules[__name__])
    workflow = {"agent": "looking_agents.Looks", "http_library": library}
    section = {"agents": {"workflow": workflow}}
    config = section_config(section, "agents", AgentsConfig, "experiment.yaml").workflow
    assert config is not None
    async with AsyncExitStack() as stack:
        runner = await start_runner(config, "experiment.yaml")
        stack.push_async_callback(runner.close)
        async with runner.seat() as seat:
            end = await seat.run({}, ACCESS, 20.0)
    assert end.rewards[""] == float(library == "httpx2"), end
