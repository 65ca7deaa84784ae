"""A fake learner, fake agents and a fake inference server that speak the real messages.

They play no game: an episode's reward is a function of its seed. They do what the scheduler can observe
of the real ones: settle through the buffer before they acknowledge, train each group once per lineage,
apply a version some time after it was published.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import yaml

from tailrace.bus import Bus
from tailrace.bus.streams import ensure_consumer
from tailrace.config import Endpoints
from tailrace.store import Outbox, ReadyGroup, StoreConnection, TrajectoryBuffer
from tailrace_protos import subjects
from tailrace_protos.base import pack_float32, pack_int32, pack_uint8
from tailrace_protos.control import (
    AgentActivity,
    LeaseReply,
    LeaseReport,
    LeaseRequest,
    RunStatus,
    ServerState,
    ServerStatus,
)
from tailrace_protos.episode import EpisodeTask, Outcome
from tailrace_protos.event import (
    CheckpointSaved,
    EventBatch,
    LearnerResumed,
    ModelPrepared,
    StepFinished,
    WeightsPublished,
)
from tailrace_protos.generation import TokenSpan
from tailrace_protos.trajectory import TokenRow, Trajectory
from tests.world.consumer import consume
from tests.world.processes import ServiceProcess, environment


class FakeServer:
    """A registry entry that beats; applies each published version a moment later."""

    def __init__(self, bus: Bus, run: str, server_id: str = "inference-0") -> None:
        self._bus = bus
        self._run = run
        self.server_id = server_id
        self.policy_version = -1
        self.started_s = time.monotonic()

    async def beat(self) -> None:
        while True:
            await self._bus.registry.put(self.status())
            await asyncio.sleep(0.05)

    def status(self) -> ServerStatus:
        lived_s = time.monotonic() - self.started_s
        return ServerStatus(
            server_id=self.server_id,
            state=ServerState.READY if self.policy_version >= 0 else ServerState.STARTING,
            nats_subject=subjects.generate(self._run, self.server_id),
            zmq_endpoint="",
            host_id="here",
            policy_version=self.policy_version,
            capacity_tokens=1 << 24,
            max_running=256,
            num_running=0,
            num_waiting=0,
            num_failed=0,
            idle_s=lived_s * 0.25,
            busy_s=lived_s * 0.75,
            heartbeat_unix_s=time.time(),
        )


class FakeAgents:
    """Plays episodes in an instant; `outcome_of` may make some of them fail."""

    def __init__(self, bus: Bus, store: StoreConnection, run: str, worker_id: str = "agents-0") -> None:
        self._bus = bus
        self._run = run
        self._buffer = TrajectoryBuffer(store, run)
        self.worker_id = worker_id
        self.outcome_of: Callable[[EpisodeTask], Outcome | None] = lambda task: Outcome.OK
        self.played: Counter[str] = Counter()  # episode id -> times
        self.tasks: dict[str, EpisodeTask] = {}
        self.held: list[EpisodeTask] = []  # not settled: `outcome_of` said None
        self.max_episodes: dict[subjects.Phase, int] = {}  # that it says it plays at once

    async def work(self, phase: subjects.Phase) -> None:
        stream = subjects.episodes_stream(self._run)
        while True:
            try:
                messages = await consume(self._bus, stream, phase, EpisodeTask, 64, 0.5)
            except TimeoutError:
                continue
            if not messages:
                continue
            tasks = [task for task, _ in messages]
            await self._lease(tasks)
            await asyncio.gather(*(self._settle(task) for task in tasks))
            held = {task.episode_id for task in self.held}
            for task, ack in messages:
                if task.episode_id not in held:
                    await ack()
            released = tuple(task.episode_id for task in tasks if task.episode_id not in held)
            report = LeaseReport(self.worker_id, released, {}, {"inference-0": len(released)})
            await self._bus.publish(subjects.lease_report(self._run), report)

    async def tell(self) -> None:
        while True:
            activity = AgentActivity(
                self.worker_id,
                len(self.held),
                0,
                0,
                0,
                time.time(),
                max_episodes=self.max_episodes,
            )
            await self._bus.publish(subjects.activity(self._run), activity)
            await asyncio.sleep(0.1)

    async def _lease(self, tasks: list[EpisodeTask]) -> None:
        """Ask until each episode has a lease: a reply may give some, and a task may come twice."""
        waiting = {task.episode_id for task in tasks}
        while waiting:
            ids = tuple(sorted(waiting))
            request = LeaseRequest(self.worker_id, ids, (50,) * len(ids))
            reply = await self._bus.request(
                subjects.lease(self._run), request, LeaseReply, timeout_s=2.0, idempotent_retries=20
            )
            given = {lease.episode_id for lease in reply.leases}
            assert given <= waiting
            waiting -= given
            await asyncio.sleep(reply.retry_after_s)

    async def _settle(self, task: EpisodeTask) -> None:
        self.played[task.episode_id] += 1
        self.tasks[task.episode_id] = task
        outcome = self.outcome_of(task)
        if outcome is None:
            self.held.append(task)
            return
        await self.put(task, outcome)

    async def put(self, task: EpisodeTask, outcome: Outcome = Outcome.OK) -> None:
        """Settle an episode, one that is held too."""
        await self._buffer.put_trajectory(made_trajectory(task, outcome))


def whole_lines(path: Path) -> list[dict[str, Any]]:
    """Lines of a file to which another process may be writing; not one that it has half written."""
    whole, _, _ = path.read_bytes().rpartition(b"\n")
    return [msgspec.json.decode(line) for line in whole.splitlines()]


def made_trajectory(task: EpisodeTask, outcome: Outcome) -> Trajectory:
    success = float(task.task.seed % 4 == 0)
    return Trajectory(
        episode_id=task.episode_id,
        group_id=task.group_id,
        member=task.member,
        attempt=task.attempt,
        phase=task.phase,
        task=task.task,
        outcome=outcome,
        reason="",
        reward=success,
        metrics={"success": success},
        started_unix_s=time.time(),
        finished_unix_s=time.time(),
        rows=(
            TokenRow(
                token_ids=pack_int32([1, 2, 3]),
                loss_mask=pack_uint8([0, 1, 1]),
                inference_logprobs=pack_float32([0.0, -1.0, -1.0]),
                spans=(TokenSpan(0, "", 2),),
                turn_ends=pack_int32([3]),
                turn_rewards=pack_float32([success]),
                reward=success,
            ),
        ),
    )


class FakeLearner:
    """Makes a step of every `groups_per_step` groups and a checkpoint every `save_steps`."""

    def __init__(
        self,
        bus: Bus,
        store: StoreConnection,
        run: str,
        server: FakeServer,
        *,
        max_steps: int,
        groups_per_step: int,
        save_steps: int = 1000,
    ) -> None:
        self._buffer = TrajectoryBuffer(store, run)
        self._outbox = Outbox(store, run)
        self._server = server
        self.max_steps = max_steps
        self.groups_per_step = groups_per_step
        self.save_steps = save_steps
        self.keeps_places_at = 0  # staleness; 0: it takes what is closed
        self.step = 0
        self.policy_version = -1
        self.lineage = ""
        self.apply_after_s = 0.0
        self.num_groups_seen = 0
        self._applying: set[asyncio.Task[None]] = set()

    async def begin(self, step: int = 0, checkpoint: str = "") -> None:
        self.lineage, self.step = uuid.uuid4().hex[:8], step
        self._buffer.rewind()
        await self._outbox.emit("learner", ModelPrepared(1000, 0, 0.0, None))
        await self._publish()
        resumed = LearnerResumed(self.lineage, step, step * self.groups_per_step, checkpoint)
        await self._outbox.emit("learner", resumed)

    async def train(self) -> None:
        waiting: list[ReadyGroup] = []
        trained: list[str] = []
        while self.step < self.max_steps:
            old_step = self.step - self.keeps_places_at if self.keeps_places_at else -1
            missing = self.groups_per_step - len(waiting)
            new = await self._buffer.next_groups(missing, 0.2, old_step)
            self.num_groups_seen += len(new)
            waiting += new
            if len(waiting) < self.groups_per_step:
                continue
            await self._step([ready.group.group_id for ready in waiting])
            trained += [ready.entry_id for ready in waiting]
            waiting = []
            if self.step % self.save_steps == 0 or self.step == self.max_steps:
                saved = CheckpointSaved(self.lineage, self.step, f"step_{self.step}", len(trained))
                await self._buffer.commit_checkpoint(trained, saved)
                trained = []

    async def _step(self, group_ids: list[str]) -> None:
        self.step += 1
        version = self.policy_version + 1
        metrics: dict[str, float | None] = {"loss": 0.5, "reward_mean": 0.25, "learner_busy_s": 0.001}
        finished = StepFinished(
            self.lineage, self.step, version, tuple(group_ids), 0, time.time(), time.time(), metrics
        )
        await self._outbox.emit("learner", finished)
        await self._publish()

    async def _publish(self) -> None:
        self.policy_version += 1
        published = WeightsPublished(self.policy_version, self.lineage, self.step, 10)
        await self._outbox.emit("weight_sync", published)
        applying = asyncio.create_task(self._apply(self.policy_version))
        self._applying.add(applying)
        applying.add_done_callback(self._applying.discard)

    async def _apply(self, version: int) -> None:
        await asyncio.sleep(self.apply_after_s)
        self._server.policy_version = max(self._server.policy_version, version)


class FakeRun:
    """One run: the real scheduler and the fakes around it."""

    def __init__(
        self,
        endpoints: Endpoints,
        bus: Bus,
        store: StoreConnection,
        folder: Path,
        run: str,
        **changes: Any,
    ) -> None:
        scheduler = {
            "tags": ["Lake"],
            "eval_groups": 6,
            "eval_interim_groups": 3,
            "reconcile_interval_s": 0.3,
            **changes.pop("scheduler", {}),
        }
        top = {
            "group_size": 3,
            "groups_per_step": 4,
            "max_staleness": 1,
            "max_steps": 3,
            "eval_steps": 2,
        }
        self.keys: dict[str, Any] = {**top, **changes}
        experiment = {"exp_name": run, "output_dir": str(folder), **self.keys, "scheduler": scheduler}
        self.run_dir = folder / run
        self.run = run
        self.bus = bus
        self.store = store
        config = folder / "experiment.yaml"
        config.write_text(yaml.safe_dump(experiment))
        self.scheduler, self.standby = (
            ServiceProcess("scheduler", config, environment(endpoints, folder), folder / f"{name}.log")
            for name in ("scheduler", "standby")
        )
        self.server = FakeServer(bus, run)
        self.agents = FakeAgents(bus, store, run)
        self.learner = FakeLearner(
            bus,
            store,
            run,
            self.server,
            max_steps=self.keys["max_steps"],
            groups_per_step=self.keys["groups_per_step"],
        )
        if self.keys.get("stale_groups") in ("wait", "close", "auto"):
            self.learner.keeps_places_at = self.keys["max_staleness"]
        self.statuses: list[RunStatus] = []
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> FakeRun:
        self.scheduler.start()
        await self.bus.subscribe(subjects.run_status(self.run), RunStatus, self._on_status)
        await self.until(lambda: bool(self.statuses))  # the streams are provisioned
        for work in (
            self.server.beat(),
            self.agents.work("train"),
            self.agents.work("eval"),
            self.agents.tell(),
        ):
            self.go(work)
        return self

    async def __aexit__(self, *exc: object) -> None:
        # Once is not enough: `wait_for` of Python 3.11, in nats-py, loses one that meets its timeout.
        while running := [task for task in self._tasks if not task.done()]:
            for task in running:
                task.cancel()
            await asyncio.wait(running, timeout=1.0)
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self.scheduler.kill()
        self.standby.kill()

    def go(self, work: Any) -> asyncio.Task[None]:
        task: asyncio.Task[None] = asyncio.create_task(work)
        self._tasks.append(task)
        return task

    async def until(self, holds: Callable[[], bool], within_s: float = 120.0) -> None:
        """Return once `holds`; polls, because what is waited for happens in another process."""
        end_s = time.monotonic() + within_s
        while not holds():
            for task in self._tasks:
                if task.done():
                    task.result()
            if time.monotonic() > end_s:
                log = self.scheduler.log[-3000:]
                raise TimeoutError(f"{self.statuses[-1:]}\n{self.learner.step}\n{log}")
            await asyncio.sleep(0.02)

    async def until_finished(self) -> None:
        await self.until(lambda: self.statuses[-1].phase == "finished")

    @property
    def rows(self) -> list[dict[str, Any]]:
        return whole_lines(self.run_dir / "metrics.jsonl")

    @property
    def lines(self) -> list[dict[str, Any]]:
        return whole_lines(self.run_dir / "events.jsonl")

    def bodies(self, kind: str) -> list[dict[str, Any]]:
        return [line["body"] for line in self.lines if line["body"]["type"] == kind]

    async def announced(self) -> list[str]:
        """Every `seq` in the EVENTS stream, as published."""
        stream = subjects.events_stream(self.run)
        await ensure_consumer(
            self.bus.jetstream, stream, "test", filter_subject=subjects.events(self.run)
        )
        seqs: list[str] = []
        while True:  # a fetch may find none in time although there are some
            for batch, ack in await consume(self.bus, stream, "test", EventBatch, 100, 0.3):
                seqs += [event.seq for event in batch.events]
                await ack()
            info = await self.bus.jetstream.consumer_info(stream, "test")
            if not info.num_pending and not info.num_ack_pending:
                return seqs

    async def _on_status(self, status: RunStatus) -> None:
        self.statuses.append(status)
