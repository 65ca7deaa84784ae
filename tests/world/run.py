"""One run with real NATS and Redis: a scheduler that leases, a reward service, an experiment file."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from tailrace.bus import StreamLimits
from tailrace.channel import Address
from tailrace.config import Endpoints
from tailrace.runtime import Args, Service
from tailrace.store import Blobs, StoreConnection, connect
from tailrace_protos import subjects
from tailrace_protos.control import AgentActivity, LeaseReply, LeaseReport, LeaseRequest
from tailrace_protos.episode import Lease
from tailrace_protos.reward import ScoreReply, ScoreRequest
from tailrace_protos.weights import ModelCard
from tailrace_reward.config import RewardConfig
from tailrace_reward.core.scoring import Scorer
from tailrace_reward.handlers import ScoreHandler
from tests.world.processes import ServiceProcess, environment
from tests.world.servers import ServerProcess
from tests.world.serving import load_args, make_service, serving

Build = Callable[[Args], Awaitable[Service]]


class FakeScheduler:
    """Leases servers in turn, another one after a failure; keeps the reports of its clients."""

    def __init__(self, service: Service, run: str) -> None:
        self.addresses: list[Address] = []
        self.requests: list[LeaseRequest] = []
        self.reports: list[LeaseReport] = []
        self.activities: list[AgentActivity] = []
        service.endpoint(subjects.lease(run), LeaseRequest, self.lease)
        service.subscribe(subjects.lease_report(run), LeaseReport, self._on_report)
        service.subscribe(subjects.activity(run), AgentActivity, self._on_activity)

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

    async def _on_report(self, report: LeaseReport) -> None:
        self.reports.append(report)

    async def _on_activity(self, activity: AgentActivity) -> None:
        self.activities.append(activity)


class Rewards:
    """Scores as the reward service does by default; requests wait until `free` is set.

    With `is_real`, a test starts the service instead.
    """

    def __init__(self, service: Service, run: str, is_real: bool) -> None:
        self.requests: list[ScoreRequest] = []
        self.free = asyncio.Event()
        self.free.set()
        self._handler = ScoreHandler(Scorer(RewardConfig().components))
        if not is_real:
            service.endpoint(subjects.score(run), ScoreRequest, self.score)

    async def score(self, request: ScoreRequest) -> ScoreReply:
        self.requests.append(request)
        await self.free.wait()
        return await self._handler.score(request)


@dataclass(kw_only=True)
class RunWorld:
    """One run and its surroundings; services of the tests start in this process or in their own."""

    run: str
    service: Service  # of the scheduler and of the rewards
    scheduler: FakeScheduler
    rewards: Rewards
    redis: StoreConnection
    folder: Path
    nats: ServerProcess
    redis_server: ServerProcess
    stack: AsyncExitStack
    run_settings: dict[str, Any] = field(default_factory=dict)  # at the top of the experiment file

    @property
    def endpoints(self) -> Endpoints:
        return Endpoints(nats_url=self.nats.url, redis_url=self.redis_server.url, host_id="test")

    async def put_card(self, card: ModelCard) -> None:
        await Blobs(self.redis, self.run).put_model_card(card)

    def experiment_file(self, section: str, settings: Mapping[str, Any]) -> Path:
        """Write an experiment file with one service's section."""
        (self.folder / section).mkdir(exist_ok=True)
        path = self.folder / section / "experiment.yaml"
        output_dir = str(self.folder / "runs")
        content = {"exp_name": self.run, "output_dir": output_dir, **self.run_settings}
        path.write_text(yaml.safe_dump({**content, section: dict(settings)}))
        return path

    async def start_service(self, build: Build, config: Path, instance_id: str) -> Service:
        """Start a service in this process."""
        service = await build(load_args(config, instance_id, self.endpoints))
        await self.stack.enter_async_context(serving(service))
        return service

    def spawn_service(
        self, service: str, config: Path, instance_id: str, *arguments: str, **variables: str
    ) -> ServiceProcess:
        """Start a service in a process of its own, to be killed."""
        process = ServiceProcess(
            service,
            config,
            environment(self.endpoints, self.folder) | variables,
            self.folder / f"{instance_id}.log",
            arguments,
        )
        process.start()
        self.stack.callback(process.kill)
        return process


@asynccontextmanager
async def run_world(
    nats: ServerProcess,
    redis_server: ServerProcess,
    run: str,
    folder: Path,
    *,
    real_rewards: bool = False,
) -> AsyncIterator[RunWorld]:
    """A run with its streams, a reward service and a scheduler; no model card and no server yet."""
    async with AsyncExitStack() as stack:
        redis = await connect(redis_server.url)
        stack.push_async_callback(redis.aclose)
        service = make_service(nats.url, run, "scheduler")
        scheduler, rewards = FakeScheduler(service, run), Rewards(service, run, real_rewards)
        await stack.enter_async_context(serving(service))
        # Agents send a heartbeat every 3.3 s.
        await service.bus.provision_run(run, StreamLimits(ack_wait_s=5.0))
        yield RunWorld(
            run=run,
            service=service,
            scheduler=scheduler,
            rewards=rewards,
            redis=redis,
            folder=folder,
            nats=nats,
            redis_server=redis_server,
            stack=stack,
        )
