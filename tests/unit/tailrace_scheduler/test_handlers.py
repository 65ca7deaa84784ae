"""The edge with fake ports: what is written when, and what waits for what."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import cast

import pytest
from prometheus_client import REGISTRY, generate_latest

from tailrace.bus import Bus, CallFailedError
from tailrace.clock import SystemClock
from tailrace.config import RunConfig
from tailrace_protos.control import AgentActivity, LeaseRequest, RunStatus, ServerStatus
from tailrace_protos.episode import EpisodeTask, Outcome
from tailrace_protos.event import (
    EpisodeSettled,
    Event,
    EventBody,
    LearnerResumed,
    StepFinished,
    WeightsPublished,
)
from tailrace_protos.subjects import Phase
from tailrace_scheduler import metrics
from tailrace_scheduler.adapters import lanes
from tailrace_scheduler.config import SchedulerConfig
from tailrace_scheduler.core.hints import HINTS
from tailrace_scheduler.core.scheduler import SchedulerCore
from tailrace_scheduler.handlers import SchedulerActor, SchedulerDependencies
from tailrace_scheduler.ports import DiskFullError, GroupPlan, Row, StoredGroups
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
        self.vanished: list[str] = []
        self.missing_asked = 0
        self.stored = StoredGroups((), ())
        self.disk = threading.Event()  # a disk that syncs
        self.disk.set()

    async def read(self, max_events: int, block_s: float, after: str = "") -> list[Event]:
        found = [event for event in self.waiting if event.seq > after]
        if not found:
            await asyncio.sleep(block_s)
        return found

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

    def sync(self) -> None:
        self.disk.wait(60)
        self.did.append("sync")

    def lock(self) -> bool:
        return True

    def follow(self) -> Iterator[Event]:
        return iter(())

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

    async def group_ids(self) -> StoredGroups:
        self.did.append("compared")
        return self.stored

    async def forget(self, group_id: str, phase: Phase, num_members: int, *, is_sent: bool) -> None:
        self.did.append(f"forget {group_id}")

    async def emit(self, once: str, body: EventBody) -> None:
        self.did.append(once.split("/")[0])

    async def has_model(self) -> bool:
        return True

    async def provision(self) -> None:
        self.did.append("provision")
        self.vanished = []
        self.queue_is_full.clear()

    async def publish(self, tasks: Sequence[EpisodeTask]) -> None:
        while self.queue_is_full.is_set():
            self.did.append("waits")
            await asyncio.sleep(0.001)
        self.published += tasks

    async def missing(self) -> list[str]:
        self.missing_asked += 1
        return self.vanished

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
    await run_until_true(lambda: what in world.did, actor, *loops)


async def run_until_true(happened: Callable[[], bool], actor: SchedulerActor, *loops: str) -> None:
    tasks = [asyncio.create_task(getattr(actor, loop)()) for loop in loops]
    async with asyncio.timeout(60):
        while not happened():
            await asyncio.sleep(0.001)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_an_event_is_acknowledged_only_after_it_was_written_announced_and_synced() -> None:
    world = FakeWorld(*EVENTS)
    await run_until(made_actor(world), world, "ack", "relay", "acknowledge")
    assert [step for step in world.did if step != "ready"] == ["write", "announce", "sync", "ack"]
    assert world.waiting == []


async def test_a_disk_that_does_not_sync_holds_up_no_events() -> None:
    world = FakeWorld(*EVENTS)
    world.disk.clear()
    actor = made_actor(world)
    later = Event("5-0", 105.0, "learner", LearnerResumed("M", 0, 0, ""))

    def is_written() -> bool:
        if "ready" in world.did and later not in world.waiting:
            world.waiting.append(later)
        return world.did.count("write") == 2

    await run_until_true(is_written, actor, "relay", "acknowledge")
    assert "ack" not in world.did
    world.disk.set()
    await run_until(actor, world, "ack", "acknowledge")
    assert world.waiting == []


async def test_events_wait_while_too_many_wait_for_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lanes, "MAX_UNSYNCED", 2)
    world = FakeWorld(*EVENTS, Event("5-0", 105.0, "learner", LearnerResumed("M", 0, 0, "")))
    acknowledger = lanes.Acknowledger(world, world, SystemClock())
    full = asyncio.create_task(acknowledger.take(["0-0", "1-0"]))
    running = asyncio.create_task(acknowledger.run())
    await asyncio.wait_for(full, 60)
    running.cancel()
    assert [event.seq for event in world.waiting] == ["5-0"]


async def test_a_full_disk_holds_events_back_until_there_is_room() -> None:
    world = FakeWorld(*EVENTS)
    world.full_times = 1
    await run_until(made_actor(world), world, "ready", "relay")
    assert world.did == ["full", "write", "announce", "ready"]


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


async def test_vanished_streams_are_provisioned_again() -> None:
    world = FakeWorld(*EVENTS)
    world.vanished = ["x_EVENTS"]
    await run_until(made_actor(world), world, "provision", "relay", "reconcile")
    assert world.did.count("provision") == 1


async def test_a_vanished_queue_is_provisioned_again_while_an_episode_waits_to_go_there() -> None:
    world = FakeWorld(*EVENTS, Event("9-0", 102.0, "w", WeightsPublished(0, "L", 0, 1)))
    actor, now_s = made_actor(world), SystemClock().unix_s()
    await actor.on_status(made_status(policy_version=0, heartbeat_unix_s=now_s))
    await actor.on_activity(AgentActivity("w", 0, 0, 0, 0, now_s, max_episodes={"eval": 8}))
    world.vanished = ["x_EPISODES"]
    world.queue_is_full.set()
    await run_until(actor, world, "waits", "relay", "tick", "carry_out", "publish")
    await run_until(actor, world, "provision", "publish", "reconcile")
    assert world.did.count("provision") == 1


async def test_a_group_that_only_the_store_has_open_is_closed() -> None:
    world = FakeWorld(*EVENTS)
    world.stored = StoredGroups(("t7",), ())
    await run_until(made_actor(world), world, "forget t7", "relay", "carry_out", "reconcile")
    assert world.did.count("forget t7") == 1


async def test_no_group_is_lost_while_the_news_of_its_end_waits_for_a_disk() -> None:
    world = FakeWorld(*EVENTS)
    actor = made_actor(world)
    await run_until(actor, world, "ready", "relay")
    world.waiting, world.full_times = [Event("9-0", 102.0, "w", WeightsPublished(0, "L", 0, 1))], 1_000
    relay = asyncio.create_task(actor.relay())
    async with asyncio.timeout(60):
        while "full" not in world.did:
            await asyncio.sleep(0.001)
    world.stored = StoredGroups(("t7",), ())
    looks = world.missing_asked
    await run_until_true(lambda: world.missing_asked > looks + 5, actor, "carry_out", "reconcile")
    relay.cancel()
    assert world.did.count("compared") <= 1
    assert "forget t7" not in world.did


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


def settled(member: int, outcome: Outcome) -> EpisodeSettled:
    return EpisodeSettled(
        f"t1.{member}", "t1", member, "train", outcome, "", 0.0, None, 1, 1, 0, 0, 1.0, 2.0
    )


async def test_each_episode_that_ended_is_counted_whoever_ended_it() -> None:
    bodies = [settled(0, Outcome.OK), settled(1, Outcome.TIMEOUT)]
    events = [Event(f"{n}-0", 100.0 + n, "scheduler", body) for n, body in enumerate(bodies)]
    metrics.SETTLED.clear()
    world = FakeWorld(*events)
    await run_until(made_actor(world), world, "ack", "relay", "acknowledge")
    counted = [
        REGISTRY.get_sample_value(
            "tailrace_scheduler_settled_episodes_total", {"phase": "train", "outcome": outcome}
        )
        for outcome in ("ok", "timeout", "infra_failure")
    ]
    assert counted == [1, 1, None]


def test_the_run_has_its_steps_in_the_phase_of_now_alone() -> None:
    for phase in ("evaluating", "training"):
        status = RunStatus(7, 9, 7, 0, 0, 0, 1, None, None, None, None, None, phase, 1.0, None)
        metrics.show_status(status)
    assert REGISTRY.get_sample_value("tailrace_scheduler_step", {"phase": "training"}) == 7
    assert REGISTRY.get_sample_value("tailrace_scheduler_step", {"phase": "evaluating"}) is None


def test_a_run_directory_that_is_gone_takes_no_other_metric_with_it(tmp_path: Path) -> None:
    metrics.watch_disk(tmp_path / "gone")
    assert b"tailrace_scheduler_free_disk_bytes NaN" in generate_latest()
    metrics.watch_disk(tmp_path)
    assert (REGISTRY.get_sample_value("tailrace_scheduler_free_disk_bytes") or 0.0) > 0.0


async def test_the_replay_of_a_long_log_does_not_block_the_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A blocked loop answers no probe, and its watchdog ends the process: at every new start."""
    world, has_run = FakeWorld(), threading.Event()

    def recover() -> Iterator[Event]:
        assert has_run.wait(60)
        yield EVENTS[0]

    monkeypatch.setattr(world, "recover", recover)
    asyncio.get_running_loop().call_soon(has_run.set)
    await made_actor(world).start()


async def test_a_standby_has_applied_the_log_before_it_takes_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """To read the log of millions of episodes takes a minute, in which nothing would start."""
    bodies = [StepFinished("L", step, step, (), 0, 0.0, 0.0, {}) for step in range(1, 5)]
    log = [*EVENTS[:1], *(Event(f"{n}-0", 100.0 + n, "x", body) for n, body in enumerate(bodies, 2))]
    world, unread, replayed = FakeWorld(), iter(log), list[Event]()
    answers = iter((False, False, True))

    def recover() -> Iterator[Event]:
        for event in unread:
            replayed.append(event)
            yield event

    monkeypatch.setattr(world, "lock", lambda: next(answers))
    monkeypatch.setattr(world, "follow", lambda: islice(unread, 2))
    monkeypatch.setattr(world, "recover", recover)
    actor = made_actor(world)
    recovered: list[Sequence[Row]] = []
    monkeypatch.setattr(FakeMetrics, "recover", lambda _, rows: recovered.append(rows))
    await actor.start()
    assert replayed == log[4:]
    assert [row["step"] for row in recovered[0]] == [1, 2, 3, 4]


def exported() -> set[str]:
    """Names of the series of `STEP_METRIC`."""
    (family,) = metrics.STEP_METRIC.collect()
    return {sample.labels["name"] for sample in family.samples}


def test_a_server_that_is_gone_leaves_no_series_of_its_own() -> None:
    """A run of weeks has thousands of pods, each with a name of its own."""
    metrics.STEP_METRIC.clear()
    rows = [
        {"step": n, "loss": 0.5, f"drift/pod-{n}": 0.1, f"drift_tokens/pod-{n}": 9.0}
        for n in range(300)
    ]
    rows[0]["eval/success_rate"] = 0.25
    series, restarted = metrics.StepSeries(), metrics.StepSeries()
    for row in rows:
        series.show(row)
    known = exported()
    assert {"step", "loss", "eval/success_rate", "drift/pod-299", "drift_tokens/pod-290"} <= known
    assert len(known) < 60
    metrics.STEP_METRIC.clear()
    restarted.recover(rows)
    assert {"step", "loss", "eval/success_rate", "drift/pod-299"} <= exported()
    assert len(exported()) < 60
