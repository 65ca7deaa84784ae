"""The edge with fake ports: what is written when, and what waits for what."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import cast

import pytest
from prometheus_client import REGISTRY

from tailrace.bus import Bus, CallFailedError
from tailrace.clock import SystemClock
from tailrace.config import RunConfig
from tailrace_protos.control import LeaseRequest, ServerStatus
from tailrace_protos.episode import EpisodeTask, Outcome
from tailrace_protos.event import Event, EventBody, LearnerResumed, StepFinished, WeightsPublished
from tailrace_protos.subjects import Phase
from tailrace_scheduler import metrics
from tailrace_scheduler.config import SchedulerConfig
from tailrace_scheduler.core.hints import HINTS
from tailrace_scheduler.core.scheduler import SchedulerCore
from tailrace_scheduler.handlers import SchedulerActor, SchedulerDependencies
from tailrace_scheduler.ports import DiskFullError, GroupPlan, Row
from tests.unit.tailrace_scheduler.simulation import made_status

EVENTS = [Event(f"{n}-0", 100.0 + n, "learner", LearnerResumed("L", 0, 0, "")) for n in range(2)]


class FakeWorld:
    """Every port at once; remembers in which order things were done to it."""

    def __init__(self, *events: Event) -> None:
        self.waiting = list(events)
        self.did: list[str] = []
        self.full_times = 0
        self.recorded: list[GroupPlan] = []
        self.begun: dict[str, int] = {}
        self.published: list[EpisodeTask] = []
        self.open: list[GroupPlan] = []
        self.queue_is_full = asyncio.Event()
        self.written: list[Event] = []

    async def read(self, max_events: int, block_s: float) -> list[Event]:
        if not self.waiting:
            await asyncio.sleep(block_s)
        return list(self.waiting)

    async def ack(self, seqs: Sequence[str]) -> None:
        self.did.append("ack")
        self.waiting = [event for event in self.waiting if event.seq not in seqs]

    async def announce(self, events: Sequence[Event]) -> None:
        self.did.append("announce")

    def append(self, events: Sequence[Event]) -> list[Event]:
        if self.full_times:
            self.full_times -= 1
            self.did.append("full")
            raise DiskFullError(Path("/run/events.jsonl"), 100)
        self.did.append("write")
        return list(events)

    def lock(self) -> bool:
        return True

    def recover(self) -> Iterator[Event]:
        return iter(self.written)

    def close(self) -> None:
        pass

    async def record(self, plans: Sequence[GroupPlan]) -> None:
        self.recorded += plans

    async def open_plans(self) -> list[GroupPlan]:
        return self.open

    async def next_group_index(self) -> int:
        return 0

    async def settle(
        self, group_id: str, members: Sequence[int], outcome: Outcome, reason: str
    ) -> None:
        self.did.append(f"settle {group_id}")

    async def begin(self, steps: Mapping[str, int], *, defer: bool = False) -> None:
        self.begun |= steps

    async def end_training(self, lineage: str) -> None:
        self.did.append(f"end {lineage}")

    async def places_kept(self) -> int:
        return 0

    async def raise_attempt(self, group_id: str, member: int, reason: str) -> int | None:
        return 1

    async def emit(self, once: str, body: EventBody) -> None:
        self.did.append(once.split("/")[0])

    async def has_model(self) -> bool:
        return True

    async def provision(self) -> None:
        self.did.append("provision")

    async def publish(self, tasks: Sequence[EpisodeTask]) -> None:
        while self.queue_is_full.is_set():
            await asyncio.sleep(0)
        self.published += tasks

    async def count(self, phase: Phase) -> int | None:
        return None

    async def held(self, phase: Phase) -> dict[str, EpisodeTask]:
        return {}


class FakeBus:
    """A bus that nobody listens on, and its registry."""

    def __init__(self, did: list[str] | None = None) -> None:
        self._did = did
        self.registry = self

    async def publish(self, subject: str, message: object) -> None:
        if self._did is not None:
            self._did.append(type(message).__name__)

    async def watch(self, on_status: object) -> None:
        pass


class FakeReports:
    """Keeps nothing."""

    def heard(self, status: ServerStatus) -> None:
        pass


class FakeMetrics:
    """A `metrics.jsonl` in memory."""

    def __init__(self) -> None:
        self.rows: list[Row] = []

    def recover(self, expected: Sequence[Row]) -> None:
        self.rows = list(expected)

    def append(self, row: Row) -> None:
        self.rows.append(row)

    def rewind(self, step: int) -> None:
        self.rows = []

    def close(self) -> None:
        pass


def made_actor(
    world: FakeWorld, group_timeout_s: float = 600.0, bus: Bus | None = None
) -> SchedulerActor:
    config = SchedulerConfig(tags=("A",), eval_groups=3, group_timeout_s=group_timeout_s)
    core = SchedulerCore(RunConfig(exp_name="x"), config, 0.0)
    ports = SchedulerDependencies(
        run="x",
        config_digest="",
        bus=cast(Bus, bus or FakeBus()),
        store=world,
        source=world,
        queue=world,
        events=world,
        metrics=FakeMetrics(),
        reports=FakeReports(),
        clock=SystemClock(),
    )
    return SchedulerActor(
        core, ports, reconcile_interval_s=0.01, on_ready=lambda: world.did.append("ready")
    )


async def run_until(actor: SchedulerActor, world: FakeWorld, what: str, *loops: str) -> None:
    tasks = [asyncio.create_task(getattr(actor, loop)()) for loop in loops]
    async with asyncio.timeout(10):
        while what not in world.did:
            await asyncio.sleep(0.001)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_an_event_is_acknowledged_only_after_it_was_written_and_announced() -> None:
    world = FakeWorld(*EVENTS)
    await run_until(made_actor(world), world, "ready", "relay")
    assert world.did == ["write", "announce", "ack", "ready"]


async def test_a_full_disk_holds_events_back_until_there_is_room() -> None:
    world = FakeWorld(*EVENTS)
    world.full_times = 1
    await run_until(made_actor(world), world, "ready", "relay")
    assert world.did == ["full", "write", "announce", "ack", "ready"]


async def test_a_full_queue_does_not_hold_up_settlements() -> None:
    world = FakeWorld(*EVENTS)
    world.queue_is_full.set()
    actor = made_actor(world, group_timeout_s=0.05)
    now_s = SystemClock().unix_s()
    from_server = made_status(policy_version=0, heartbeat_unix_s=now_s)
    world.waiting.append(Event("9-0", 102.0, "w", WeightsPublished(0, "L", 0, 1)))
    await actor.on_status(from_server)
    await run_until(actor, world, "settle e0-v0.00002", "relay", "tick", "carry_out", "publish")
    assert [plan.group_id for plan in world.recorded] == ["e0-v0.00000", "e0-v0.00001", "e0-v0.00002"]
    assert world.published == []


async def test_a_vanished_queue_is_provisioned_again() -> None:
    world = FakeWorld(*EVENTS)
    await run_until(made_actor(world), world, "provision", "relay", "reconcile")
    assert world.did.index("ready") < world.did.index("provision")


async def test_a_lease_request_whose_lists_do_not_match_is_the_callers_error() -> None:
    with pytest.raises(CallFailedError, match="context_tokens"):
        await made_actor(FakeWorld()).on_lease(LeaseRequest("w", ("1", "2"), (5,)))


async def test_a_scheduler_that_starts_again_exports_what_its_log_tells() -> None:
    world = FakeWorld()
    equal: dict[str, float | None] = {"num_groups": 2.0, "num_groups_zero_variance": 2.0, "loss": 0.625}
    steps = [StepFinished("L", step, step, (), 0, 0.0, 0.0, equal) for step in range(1, 7)]
    told: list[EventBody] = [LearnerResumed("L", 0, 0, ""), *steps]
    world.written = [Event(f"{n}-0", 100.0 + n, "learner", body) for n, body in enumerate(told)]
    metrics.HINTS.clear()
    metrics.STEP_METRIC.clear()
    actor = made_actor(world, bus=cast(Bus, FakeBus(world.did)))
    await actor.start()
    await run_until(actor, world, "RunStatus", "report")
    value = REGISTRY.get_sample_value
    assert value("tailrace_scheduler_step_metric", {"name": "loss"}) == 0.625
    hints = [value("tailrace_scheduler_hint", {"name": hint.name}) for hint in HINTS]
    raised = [hint.name for hint, is_raised in zip(HINTS, hints, strict=True) if is_raised]
    assert raised == ["equal_groups"]
    assert None not in hints
