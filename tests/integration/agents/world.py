"""A run around real agents: real NATS, Redis and channel; a fake engine and a fake scheduler."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from tailrace.bus import StreamLimits
from tailrace.channel import Address, ChunkSink, NatsGenerateServer, ZmqGenerateServer
from tailrace.chat import Renderer
from tailrace.config import Endpoints, load_experiment, run_config
from tailrace.runtime import Args, Service
from tailrace.store import (
    Blobs,
    GroupRecord,
    Outbox,
    StoreConnection,
    TrajectoryBuffer,
    connect,
)
from tailrace_agents.__main__ import build
from tailrace_envs import make_env
from tailrace_protos import subjects
from tailrace_protos.base import as_int32, pack_float32, pack_int32
from tailrace_protos.control import AgentActivity, Lease, LeaseReply, LeaseReport, LeaseRequest
from tailrace_protos.episode import EnvTask, EpisodeTask
from tailrace_protos.event import EpisodeSettled
from tailrace_protos.generation import FinishReason, GenerateRequest, TokenChunk, TokenSpan
from tailrace_protos.reward import ScoreReply, ScoreRequest
from tailrace_protos.trajectory import Trajectory
from tailrace_reward.config import RewardConfig
from tailrace_reward.core.scoring import Scorer
from tailrace_reward.handlers import ScoreHandler
from tests.unit.tailrace_agents.fakes import model_card
from tests.world.servers import ServerProcess
from tests.world.serving import eventually, make_service, serving

ENV_CONFIG = {"size": 3, "max_turns": 4}  # 3: its maps are enumerated in no time
REPLIES = ("Right", "Down", "Left", "Down", "Right")


def num_turns_in(request: GenerateRequest, renderer: Renderer) -> int:
    """Turns already in a prompt: its ends of turn."""
    return int(np.count_nonzero(as_int32(request.prompt_ids) == renderer.end_of_turn_id))


class FakeServer:
    """An inference server that says `REPLIES` in turn; log-probabilities and versions are recognisable.

    While `hold` is set, calls of that turn and later wait. `cut` ends the next calls' link after so
    many tokens.
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

    def abort(self, call_id: str) -> None:
        for request, sink in self._held:
            if request.call_id == call_id:
                sink.send(TokenChunk(call_id, finish_reason=FinishReason.ABORT))
        self._held = [held for held in self._held if held[0].call_id != call_id]

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


class FakeScheduler:
    """Leases servers in turn, elsewhere after a failure; remembers what agents report."""

    def __init__(self, service: Service, run: str) -> None:
        self.addresses: list[Address] = []
        self.requests: list[LeaseRequest] = []
        self.reports: list[LeaseReport] = []
        self.activities: list[AgentActivity] = []
        service.endpoint(subjects.lease(run), LeaseRequest, self.lease)
        service.subscribe(subjects.lease_report(run), LeaseReport, self._heard_report)
        service.subscribe(subjects.activity(run), AgentActivity, self._heard_activity)

    async def lease(self, request: LeaseRequest) -> LeaseReply:
        self.requests.append(request)
        usable = [one for one in self.addresses if one.server_id != request.failed_server_id]
        if not usable:
            return LeaseReply((), retry_after_s=0.05)
        pairs = zip(request.episode_ids, range(len(request.episode_ids)), strict=True)
        return LeaseReply(
            tuple(Lease(episode_id, *usable[index % len(usable)]) for episode_id, index in pairs)
        )

    @property
    def released(self) -> set[str]:
        return {episode_id for report in self.reports for episode_id in report.released}

    async def _heard_report(self, report: LeaseReport) -> None:
        self.reports.append(report)

    async def _heard_activity(self, activity: AgentActivity) -> None:
        self.activities.append(activity)


class Rewards:
    """Scores as the reward service does by default; requests wait until `free` is set."""

    def __init__(self, service: Service, run: str) -> None:
        self.requests: list[ScoreRequest] = []
        self.free = asyncio.Event()
        self.free.set()
        self._handler = ScoreHandler(Scorer(RewardConfig().components))
        service.endpoint(subjects.score(run), ScoreRequest, self.score)

    async def score(self, request: ScoreRequest) -> ScoreReply:
        self.requests.append(request)
        await self.free.wait()
        return await self._handler.score(request)


@dataclass
class World:
    """What a test holds in its hands."""

    run: str
    service: Service
    scheduler: FakeScheduler
    rewards: Rewards
    redis: StoreConnection
    buffer: TrajectoryBuffer
    renderer: Renderer
    folder: Path
    nats: ServerProcess
    redis_server: ServerProcess
    stack: AsyncExitStack
    agents_config: dict[str, Any]
    servers: dict[str, Any] = field(default_factory=dict)
    run_settings: dict[str, Any] = field(default_factory=dict)  # at the top of the experiment file

    async def start_server(self, server_id: str, policy_version: int = 1) -> FakeServer:
        """A fake inference server on both transports."""
        fake = FakeServer(server_id, self.renderer, policy_version)
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
                )
                for member, env_task in enumerate(env_tasks)
            ]
        subject = subjects.episodes(self.run, phase)
        await self.service.bus.publish_durable_many(
            [(subject, task, f"{self.run}.{task.message_id}") for task in tasks]
        )
        return tasks

    def config_file(self, **agents: Any) -> Path:
        """An experiment file for agents processes."""
        path = self.folder / "experiment.yaml"
        section = {**self.agents_config, **agents}
        content = {
            "exp_name": self.run,
            "output_dir": str(self.folder / "runs"),
            **self.run_settings,
            "agents": section,
        }
        path.write_text(yaml.safe_dump(content))
        return path

    async def start_agents(self, worker_id: str = "w0", **agents: Any) -> Service:
        """An agents service in this process."""
        source = str(self.config_file(**agents))
        experiment = load_experiment(source)
        endpoints = Endpoints(nats_url=self.nats.url, redis_url=self.redis_server.url, host_id="test")
        args = Args(source, worker_id, experiment, run_config(experiment, source), endpoints)
        service = await build(args)
        await self.stack.enter_async_context(serving(service))
        return service

    async def spawn_agents(self, worker_id: str = "w0", **agents: Any) -> asyncio.subprocess.Process:
        """An agents process of its own, to be killed."""
        environment = {
            **os.environ,
            "TAILRACE_NATS_URL": self.nats.url,
            "TAILRACE_REDIS_URL": self.redis_server.url,
            "TAILRACE_METRICS_PORT": "0",
            "TAILRACE_STATE_DIR": str(self.folder),
        }
        log = (self.folder / f"{worker_id}.log").open("w")
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "tailrace_agents",
            "--config",
            str(self.config_file(**agents)),
            "--worker-id",
            worker_id,
            env=environment,
            stderr=log,
        )
        self.stack.push_async_callback(end, process)
        return process

    async def settled(self, num_episodes: int, timeout_s: float = 30.0) -> dict[str, EpisodeSettled]:
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
        """What the learner gets, by episode id."""
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


async def end(process: asyncio.subprocess.Process) -> None:
    """Kill what a test left running."""
    if process.returncode is None:
        process.kill()
    await process.wait()


def kill(process: asyncio.subprocess.Process) -> None:
    process.send_signal(signal.SIGKILL)


@asynccontextmanager
async def world_of(
    nats: ServerProcess, redis_server: ServerProcess, run: str, folder: Path, **agents: Any
) -> AsyncIterator[World]:
    """A run with its streams, model card, reward service and scheduler; no server and no agents yet."""
    async with AsyncExitStack() as stack:
        redis = await connect(redis_server.url)
        stack.push_async_callback(redis.aclose)
        await Blobs(redis, run).put_model_card(model_card())
        service = make_service(nats.url, run, "scheduler")
        scheduler = FakeScheduler(service, run)
        rewards = Rewards(service, run)
        await stack.enter_async_context(serving(service))
        await service.bus.provision_run(run, StreamLimits(ack_wait_s=1.0))
        config = {
            "custom_envs": {"lake": {"env_type": "frozen_lake", "env_config": ENV_CONFIG}},
            "channel": {"keepalive_s": 0.1, "silence_s": 1.0},
            "render_episodes": 0,
            **agents,
        }
        yield World(
            run=run,
            service=service,
            scheduler=scheduler,
            rewards=rewards,
            redis=redis,
            buffer=TrajectoryBuffer(redis, run),
            renderer=Renderer.from_model_card(model_card()),
            folder=folder,
            nats=nats,
            redis_server=redis_server,
            stack=stack,
            agents_config=config,
        )


async def until(condition: Callable[[], bool], timeout_s: float = 20.0) -> None:
    await eventually(condition, timeout_s)


def sampled_of(trajectory: Trajectory) -> list[int]:
    (row,) = trajectory.rows
    mask = np.frombuffer(row.loss_mask, np.uint8).astype(bool)
    ids: Sequence[int] = as_int32(row.token_ids)[mask].tolist()
    return list(ids)
