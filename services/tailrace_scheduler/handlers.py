"""Edge of the scheduler: passes input to the core and carries its decisions out.

Five lanes, each in order and each repeatable from its start: the *relay* takes events from the outbox
to `events.jsonl`, the core, `metrics.jsonl` and the EVENTS stream, and acknowledges them once
`events.jsonl` is on the disk; the *store lane* carries decisions out in Redis; the *queue lane*
publishes episodes, so that a full queue holds up nothing else; the *probe lane* asks failing servers
for a token; the *reconciler* compares what is unsettled with what the queue holds. A decision leaves
its lane when it has been carried out.
"""

import asyncio
import time
import uuid
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import msgspec

from tailrace.bus import Bus, CallFailedError
from tailrace.clock import Clock
from tailrace.log import get_logger
from tailrace.retry import Backoff
from tailrace_protos import subjects
from tailrace_protos.control import (
    AgentActivity,
    LeaseReply,
    LeaseReport,
    LeaseRequest,
    SchedulerBegan,
    ServerStatus,
)
from tailrace_protos.episode import EpisodeTask
from tailrace_protos.event import Event, HintChanged, RunFailed, RunStarted
from tailrace_protos.generation import CallErrorCode
from tailrace_protos.subjects import PHASES, Phase
from tailrace_scheduler import metrics
from tailrace_scheduler.adapters.executor import Executor
from tailrace_scheduler.adapters.lanes import Acknowledger, Lane
from tailrace_scheduler.adapters.traces import RootSpans
from tailrace_scheduler.core.decisions import Decision, StoreDecision
from tailrace_scheduler.core.hints import HINTS
from tailrace_scheduler.core.run_log import Change, Rewind
from tailrace_scheduler.core.scheduler import SchedulerCore
from tailrace_scheduler.core.streams.credit import REASONS
from tailrace_scheduler.core.streams.decisions import ProbeServer
from tailrace_scheduler.ports import (
    DiskFullError,
    EpisodeQueue,
    EventLog,
    EventSource,
    GroupStore,
    MetricsLog,
    ReportLog,
)

log = get_logger(__name__)

READ_EVENTS = 512
COALESCE_S = 0.01  # the relay waits so long after a small batch, that the next one is larger
TICK_S = 0.1
STATUS_S = 0.5
MODEL_CHECK_S = 2.0
LEARNER_CHECK_S = 0.5
BATCH = 256
PUBLISH_BATCH = 512

T = TypeVar("T")


@dataclass(frozen=True)
class SchedulerDependencies:
    """Everything outside of the core."""

    run: str
    config_digest: str
    bus: Bus
    store: GroupStore
    source: EventSource
    queue: EpisodeQueue
    events: EventLog
    metrics: MetricsLog
    reports: ReportLog
    clock: Clock


class SchedulerActor:
    """One run's scheduler at work."""

    def __init__(
        self,
        core: SchedulerCore,
        world: SchedulerDependencies,
        *,
        reconcile_interval_s: float,
        on_ready: Callable[[], None],
    ) -> None:
        self._core = core
        self._world = world
        self._clock = world.clock
        self._reconcile_interval_s = reconcile_interval_s
        self._on_ready = on_ready
        self._executor = Executor(world.run, world.bus, world.store)
        self._decided: Lane[StoreDecision] = Lane("store")
        self._probes: Lane[ProbeServer] = Lane("probe")
        self._outgoing: Lane[EpisodeTask] = Lane("queue")
        self._acknowledger = Acknowledger(world.source, world.events, world.clock)
        self._unwritten: deque[Change] = deque()
        self._lagging: dict[str, int] = {}  # as reported last
        self._has_adopted = False
        self._finish_is_relayed = False
        self._told_until_s = 0.0  # monotonic: all events before it were passed on
        self._compared_s = 0.0  # monotonic: the last comparison with the store
        self._traces = RootSpans()
        self._series = metrics.StepSeries()

    # Start

    async def start(self) -> None:
        """Become the run's only scheduler, and replay the part of its log that it has not followed."""
        await self._become_only_one()
        # In a thread: the log of millions of episodes takes longer than a loop may be blocked.
        events, now_s = self._world.events.recover(), self._clock.unix_s()
        rows = await asyncio.to_thread(self._core.replay, events, now_s)
        await self._write(lambda: self._world.metrics.recover(rows))
        await asyncio.to_thread(self._series.recover, rows)
        await self._world.queue.provision()
        await self._world.store.emit(
            f"run_started/{uuid.uuid4().hex}", RunStarted(self._world.run, self._world.config_digest)
        )
        await self._world.bus.registry.watch(self.on_status)
        log.info("log replayed", num_rows=len(rows))

    async def _become_only_one(self) -> None:
        """Wait for the log's lock and follow the log: a takeover replays the newest events only."""
        backoff = Backoff(0.2, 1.0)
        while not self._world.events.lock():
            if backoff.num_failures == 0:
                self._on_ready()  # to take over
                log.info("standing by: another scheduler writes this run's log")
            await asyncio.to_thread(self._core.follow, self._world.events.follow())
            await backoff.sleep()

    async def _adopt(self) -> None:
        """Take over the groups open in Redis, after all old events; begin to decide."""
        store, queue = self._world.store, self._world.queue
        queued = [task for phase in PHASES for task in (await queue.held(phase)).values()]
        plans, next_index = await store.open_plans(), await store.next_group_index()
        self._put(self._core.adopt(plans, next_index, queued, self._clock.unix_s()))
        self._finish_is_relayed = self._core.is_finished
        self._has_adopted = True
        self._on_ready()
        began = SchedulerBegan(uuid.uuid4().hex)
        await self._world.bus.publish(subjects.scheduler_began(self._world.run), began)
        log.info(
            "state taken over",
            num_open_groups=len(plans),
            num_queued=len(queued),
            next_group_index=next_index,
        )

    # Input

    async def on_lease(self, request: LeaseRequest) -> LeaseReply:
        """Place episodes on inference servers."""
        if len(request.episode_ids) != len(request.context_tokens):
            raise CallFailedError(
                CallErrorCode.INVALID, "context_tokens needs one number for each of episode_ids"
            )
        reply = self._core.lease(request, self._clock.unix_s())
        metrics.LEASES.inc(len(reply.leases))
        if not reply.leases:
            metrics.UNPLACED.inc()
        return reply

    async def on_lease_report(self, report: LeaseReport) -> None:
        """Take released and failed leases."""
        self._core.on_lease_report(report, self._clock.unix_s())

    async def on_activity(self, activity: AgentActivity) -> None:
        """Take the activity of an agents worker's episodes."""
        self._core.on_activity(activity, self._clock.unix_s())

    async def on_status(self, status: ServerStatus) -> None:
        """An inference server's heartbeat."""
        self._world.reports.heard(status)
        self._core.on_status(status, self._clock.unix_s())

    # Loops

    async def relay(self) -> None:
        """Pass events on for ever; take over from Redis after the old ones."""
        after = ""  # after a failure all that are not acknowledged come again
        while True:
            begun_s = self._clock.monotonic_s()
            block_s = 0.5 if self._has_adopted else 0.0
            events = await self._world.source.read(READ_EVENTS, block_s, after)
            if events:
                await self._pass_on(events)
                after = events[-1].seq
            elif not self._has_adopted:
                await self._adopt()
            if len(events) < READ_EVENTS:
                self._told_until_s = begun_s
                await self._clock.sleep(COALESCE_S)

    async def acknowledge(self) -> None:
        """Acknowledge events that are on the disk."""
        await self._acknowledger.run()

    async def tick(self) -> None:
        """Decide what time alone makes due."""
        while True:
            self._decide()
            await self._clock.sleep(TICK_S)

    async def carry_out(self) -> None:
        """The store lane."""
        while True:
            decisions = await self._decided.head(BATCH)
            num_done, episodes = await self._executor.carry_out(decisions)
            self._outgoing.put(episodes)
            self._decided.done(num_done)

    async def probe(self) -> None:
        """The probe lane: failing servers get nothing until they sample a token."""
        while True:
            probes = await self._probes.head(BATCH)
            results = await asyncio.gather(*(self._executor.probe(one.server_id) for one in probes))
            for one, succeeded in zip(probes, results, strict=True):
                self._core.on_probed(one.server_id, succeeded, self._clock.unix_s())
            self._probes.done(len(probes))

    async def publish(self) -> None:
        """The queue lane."""
        while True:
            episodes = await self._outgoing.head(PUBLISH_BATCH)
            self._traces.admitted(episodes, time.time())  # as the spans of other processes
            await self._world.queue.publish(episodes)
            self._outgoing.done(len(episodes))

    async def reconcile(self) -> None:
        """Make streams and consumers anew that vanished, and publish again what the queue has lost."""
        while True:
            await self._clock.sleep(self._reconcile_interval_s)
            await self._make_missing()  # also while a lane waits for them
            if self._has_adopted and not self._decided and not self._outgoing:
                for phase in PHASES:
                    await self._reconcile(phase)
                if self._told_until_s > self._compared_s:
                    await self._compare()

    async def report(self) -> None:
        """Report the run's state to live views and metrics."""
        while True:
            status = self._core.status(self._clock.unix_s())
            is_relayed = self._finish_is_relayed and not self._acknowledger
            if status.phase == "finished" and not is_relayed:
                status = msgspec.structs.replace(status, phase="finishing")
            metrics.show_status(status)
            metrics.EPISODES.set(sum(self._core.num_unsettled(phase) for phase in PHASES))
            metrics.WAITING.set(self._core.num_waiting)
            metrics.LEASES_HELD.set(self._core.num_leases)
            for hint in HINTS:
                metrics.HINTS.labels(hint.name).set(hint.name in self._core.raised_hints)
            for reason in REASONS:
                metrics.BLOCKED.labels(reason).set(status.blocked_by == reason)
            self._tell_lagging(self._core.lagging(self._clock.unix_s()))
            await self._world.bus.publish(subjects.run_status(self._world.run), status)
            await self._clock.sleep(STATUS_S)

    def _tell_lagging(self, lagging: dict[str, int]) -> None:
        metrics.LAGGING.set(len(lagging))
        for server_id in lagging.keys() - self._lagging.keys():
            log.warning(
                "server gets no new episodes: its weights are too old (scheduler.max_version_spread)",
                server_id=server_id,
                policy_version=lagging[server_id],
            )
        for server_id in self._lagging.keys() - lagging.keys():
            log.info("server caught up, or is gone", server_id=server_id)
        self._lagging = lagging

    async def watch_learner(self) -> None:
        """Look whether the learner waits for groups that it must train in this step."""
        while self._core.closes_early:
            self._core.learner_waits(await self._world.store.places_kept())
            await self._clock.sleep(LEARNER_CHECK_S)

    async def watch_model(self) -> None:
        """Wait until the learner has a model and prepares its first weights."""
        while not self._core.has_model:
            self._core.has_model = await self._world.store.has_model()
            await self._clock.sleep(MODEL_CHECK_S)

    # Parts

    async def _pass_on(self, events: Sequence[Event]) -> None:
        fresh = await self._write(lambda: self._world.events.append(events))
        now_s = self._clock.unix_s()
        for event in fresh:
            self._unwritten.extend(self._core.on_event(event, now_s))
            _log_health(event)
            self._traces.take(event.body)
            metrics.count(event.body)
        self._decide()
        while self._unwritten:
            await self._write(lambda: self._apply_to_metrics(self._unwritten[0]))
            self._unwritten.popleft()
        await self._announce(events, len(fresh))
        await self._acknowledger.take(event.seq for event in events)
        metrics.EVENTS.inc(len(fresh))
        self._finish_is_relayed = self._core.is_finished

    async def _announce(self, events: Sequence[Event], num_fresh: int) -> None:
        """Publish; what an earlier scheduler wrote goes apart, under the message id it had then."""
        num_old = len(events) - num_fresh
        for batch in (events[:num_old], events[num_old:]):
            if batch:
                await self._world.queue.announce(batch)

    def _apply_to_metrics(self, change: Change) -> None:
        if isinstance(change, Rewind):
            self._world.metrics.rewind(change.step)
        else:
            self._world.metrics.append(change)
            self._series.show(change)

    async def _write(self, write: Callable[[], T]) -> T:
        """Write into the run directory; waits for room on a full disk."""
        backoff = Backoff(0.5, 5.0)
        while True:
            try:
                return write()
            except DiskFullError as error:
                metrics.FULL_DISK_WAITS.inc()
                log.error("disk full", path=str(error.path), reason=str(error))
                await backoff.sleep()

    def _decide(self) -> None:
        if self._has_adopted:
            self._put(self._core.decide(self._clock.unix_s()))

    def _put(self, decisions: Sequence[Decision]) -> None:
        for decision in decisions:
            metrics.DECISIONS.labels(type(decision).__name__).inc()
        self._decided.put(one for one in decisions if not isinstance(one, ProbeServer))
        self._probes.put(one for one in decisions if isinstance(one, ProbeServer))

    async def _make_missing(self) -> None:
        if missing := await self._world.queue.missing():
            log.error("streams of the run have vanished; making them anew", missing=missing)
            metrics.REPROVISIONED.inc()
            await self._world.queue.provision()

    async def _compare(self) -> None:
        """Compare the groups with the store's; not while news of the last comparison's time waits."""
        stored = await self._world.store.group_ids()
        self._compared_s = self._clock.monotonic_s()
        self._put(self._core.audit(stored))

    async def _reconcile(self, phase: Phase) -> None:
        queue = self._world.queue
        before = self._core.num_unsettled(phase)
        count = await queue.count(phase)
        is_balanced = count is not None and count >= min(before, self._core.num_unsettled(phase))
        held = None if is_balanced else await queue.held(phase)
        self._put(self._core.reconcile(phase, held))


def _log_health(event: Event) -> None:
    match event.body:
        case HintChanged(name, is_raised, text, step):
            if is_raised:
                log.warning("hint", name=name, step=step, text=text)
            else:
                log.info("hint no longer holds", name=name, step=step)
        case RunFailed(rule, step, reason):
            log.error("run failed", rule=rule, step=step, reason=reason)
