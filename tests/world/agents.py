"""A run around real agents: real NATS, Redis and channel; scripted inference servers."""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from tailrace.channel import Address, ChunkSink, NatsGenerateServer, ZmqGenerateServer
from tailrace.chat import Renderer
from tailrace.runtime import Service
from tailrace.store import GroupRecord, Outbox, TrajectoryBuffer
from tailrace_agents.__main__ import build
from tailrace_envs import make_env
from tailrace_protos import subjects
from tailrace_protos.base import as_int32, pack_float32, pack_int32
from tailrace_protos.episode import EnvTask, EpisodeTask
from tailrace_protos.event import EpisodeSettled
from tailrace_protos.generation import FinishReason, GenerateRequest, TokenChunk, TokenSpan
from tailrace_protos.trajectory import Trajectory
from tailrace_protos.weights import ModelCard
from tests.unit.tailrace_agents.fakes import model_card
from tests.world.processes import ServiceProcess
from tests.world.run import RunWorld, run_world
from tests.world.servers import ServerProcess

ENV_CONFIG = {"size": 3, "max_turns": 4}  # 3: its maps are enumerated in no time
REPLIES = ("Right", "Down", "Left", "Down", "Right")


def num_turns_in(request: GenerateRequest, renderer: Renderer) -> int:
    """Turns already in a prompt: its ends of turn."""
    return int(np.count_nonzero(as_int32(request.prompt_ids) == renderer.end_of_turn_id))


class FakeServer:
    """An inference server that samples `REPLIES` in turn, with log-probabilities that show its version.

    Calls of turn `hold_from_turn` and later wait. With `stop_after_tokens`, calls stop after so many
    tokens without an end.
    """

    def __init__(self, server_id: str, renderer: Renderer, policy_version: int = 1) -> None:
        self.server_id = server_id
        self.policy_version = policy_version
        self.requests: list[GenerateRequest] = []
        self.hold_from_turn: int | None = None
        self.stop_after_tokens: int | None = None
        self.emitted: dict[str, list[tuple[int, list[int]]]] = defaultdict(list)
        self._held: list[tuple[GenerateRequest, ChunkSink]] = []
        self._renderer = renderer

    def submit(self, request: GenerateRequest, sink: ChunkSink) -> None:
        self.requests.append(request)
        turn = num_turns_in(request, self._renderer)
        if self.hold_from_turn is not None and turn >= self.hold_from_turn:
            self._held.append((request, sink))
        else:
            self._answer(request, sink)

    def release_prefixes(self, episode_ids: tuple[str, ...]) -> None:
        """No context is kept."""

    def abort(self, call_id: str) -> None:
        for request, sink in self._held:
            if request.call_id == call_id:
                sink.send(TokenChunk(call_id, finish_reason=FinishReason.ABORT))
        self._held = [held for held in self._held if held[0].call_id != call_id]

    def release(self) -> None:
        """Answer what is held; hold nothing more."""
        self.hold_from_turn = None
        held, self._held = self._held, []
        for request, sink in held:
            self._answer(request, sink)

    @property
    def num_held(self) -> int:
        return len(self._held)

    def _answer(self, request: GenerateRequest, sink: ChunkSink) -> None:
        turn = num_turns_in(request, self._renderer)
        ids = self._renderer.reply_ids(REPLIES[turn % len(REPLIES)]).tolist()[request.num_continued :]
        finish: FinishReason | None = FinishReason.STOP
        if self.stop_after_tokens is not None:
            ids, finish = ids[: self.stop_after_tokens], None
        self.emitted[request.episode_id].append((turn, ids))
        spans = (TokenSpan(self.policy_version, "", len(ids)),) if ids else ()
        logprobs = [-0.125 * self.policy_version] * len(ids)
        sink.send(TokenChunk(request.call_id, pack_int32(ids), pack_float32(logprobs), spans, finish))


@dataclass(kw_only=True)
class AgentsWorld(RunWorld):
    """A run with episodes in its queue; starts inference servers and agents."""

    renderer: Renderer
    agents_config: dict[str, Any]
    servers: dict[str, Any] = field(default_factory=dict)
    buffer: TrajectoryBuffer = field(init=False)

    def __post_init__(self) -> None:
        self.buffer = TrajectoryBuffer(self.redis, self.run)

    async def start_server(
        self, server_id: str, policy_version: int = 1, kind: type[FakeServer] = FakeServer
    ) -> FakeServer:
        """A fake inference server on both transports."""
        fake = kind(server_id, self.renderer, policy_version)
        over_zmq = ZmqGenerateServer(f"ipc://{self.folder}/{server_id}.ipc")
        subject = subjects.generate(self.run, server_id)
        over_nats = NatsGenerateServer(self.service.bus.connection.client, subject)
        for server in (over_zmq, over_nats):
            await server.start(fake)
            self.stack.push_async_callback(server.stop)
        self.servers[server_id] = (over_zmq, over_nats)
        self.scheduler.addresses.append(Address(server_id, subject, over_zmq.endpoint))
        return fake

    async def stop_server(self, server_id: str) -> None:
        for server in self.servers[server_id]:
            await server.stop()

    async def admit(
        self,
        num_groups: int,
        group_size: int = 2,
        *,
        phase: subjects.Phase = "train",
        env_name: str = "lake",
        first: int = 0,
        seeds: Sequence[int] = (),
        deadline_s: float = 60.0,
        timeout_s: float = 60.0,
    ) -> list[EpisodeTask]:
        """Record groups and queue their episodes, as the scheduler does."""
        deadline = time.time() + deadline_s
        tasks = []
        for index in range(first, first + num_groups):
            seed = seeds[index - first] if seeds else index
            env_tasks = tuple(EnvTask(env_name, seed, index) for _ in range(group_size))
            record = GroupRecord(
                group_id=f"{phase}-{index}",
                group_index=index,
                phase=phase,
                tasks=env_tasks,
                deadline_unix_s=deadline,
                min_valid=1,
                step=0,
            )
            await self.buffer.record_group(record)
            tasks += [
                EpisodeTask(
                    record.episode_id(member),
                    record.group_id,
                    member,
                    0,
                    phase,
                    env_task,
                    deadline,
                    timeout_s,
                )
                for member, env_task in enumerate(env_tasks)
            ]
        subject = subjects.episodes(self.run, phase)
        await self.service.bus.publish_durable_many(
            [(subject, task, f"{self.run}.{task.message_id}") for task in tasks]
        )
        return tasks

    def _config(self, agents: dict[str, Any]) -> Path:
        return self.experiment_file("agents", {**self.agents_config, **agents})

    async def start_agents(self, worker_id: str = "w0", **agents: Any) -> Service:
        """Start an agents service in this process."""
        return await self.start_service(build, self._config(agents), worker_id)

    def spawn_agents(self, worker_id: str = "w0", **agents: Any) -> ServiceProcess:
        """Start an agents process of its own, to be killed."""
        arguments = ("--worker-id", worker_id)
        return self.spawn_service("agents", self._config(agents), worker_id, *arguments)

    async def settled(self, num_episodes: int, timeout_s: float = 120.0) -> dict[str, EpisodeSettled]:
        """Settlements by episode id, once there are so many."""
        found: dict[str, EpisodeSettled] = {}
        outbox = Outbox(self.redis, self.run)
        async with asyncio.timeout(timeout_s):
            while len(found) < num_episodes:
                for event in await outbox.read(1000, 0.2):
                    if isinstance(event.body, EpisodeSettled):
                        assert event.body.episode_id not in found, "settled twice"
                        found[event.body.episode_id] = event.body
                    await outbox.ack([event.seq])
        return found

    async def trajectories(self, num_groups: int) -> dict[str, Trajectory]:
        """Trajectories that the learner gets, by episode id."""
        found: dict[str, Trajectory] = {}
        groups = []
        while len(groups) < num_groups:
            groups += await self.buffer.next_groups(num_groups, 5.0)
        for ready in groups:
            found |= {member.episode_id: member for member in ready.group.members}
        return found


def seeds_of_long_episodes(num_seeds: int, num_turns: int) -> list[int]:
    """Seeds of maps on which `REPLIES` lead to no hole within so many turns."""
    env = make_env("frozen_lake", {**ENV_CONFIG, "max_turns": num_turns + 1})
    found: list[int] = []
    seed = 0
    while len(found) < num_seeds:
        env.reset(seed=seed)
        if not any(env.step(reply)[2] for reply in REPLIES[:num_turns]):
            found.append(seed)
        seed += 1
    return found


@asynccontextmanager
async def agents_world(
    nats: ServerProcess,
    redis_server: ServerProcess,
    run: str,
    folder: Path,
    card: ModelCard | None = None,
    *,
    real_rewards: bool = False,
) -> AsyncIterator[AgentsWorld]:
    """A run with its streams, model card, reward service and scheduler; no server and no agents yet."""
    config = {
        "custom_envs": {"lake": {"env_type": "frozen_lake", "env_config": ENV_CONFIG}},
        "channel": {"keepalive_s": 0.1, "silence_s": 1.0},
        "render_episodes": 0,
    }
    card = card or model_card()
    async with run_world(nats, redis_server, run, folder, real_rewards=real_rewards) as base:
        await base.put_card(card)
        renderer = Renderer.from_model_card(card)
        yield AgentsWorld(**vars(base), renderer=renderer, agents_config=config)


def sampled_of(trajectory: Trajectory) -> list[int]:
    (row,) = trajectory.rows
    mask = np.frombuffer(row.loss_mask, np.uint8).astype(bool)
    ids: Sequence[int] = as_int32(row.token_ids)[mask].tolist()
    return list(ids)
