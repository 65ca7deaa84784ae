"""The scheduler's decisions as one state machine: events, reports and time in, decisions out.

Invariants: training credit is never exceeded; every admitted group closes; an event applied twice
changes nothing the second time; the same events in the same order give the same state, so that a
restart is a replay of `events.jsonl` and a look at the groups that Redis has open.
`now_s` is unix time everywhere and never read from a clock here.
"""

from collections.abc import Collection, Iterable, Sequence

import msgspec

from tailrace.config import RunConfig
from tailrace_protos.control import (
    AgentActivity,
    LeaseReply,
    LeaseReport,
    LeaseRequest,
    RunStatus,
    ServerStatus,
)
from tailrace_protos.episode import EpisodeTask
from tailrace_protos.event import (
    CheckpointSaved,
    EpisodeSettled,
    EvaluationFinished,
    EvaluationStarted,
    Event,
    GroupAdmitted,
    GroupClosed,
    GroupDropped,
    LearnerResumed,
    RunFailed,
    RunFinished,
    ServerQuarantined,
    StepFinished,
    TaskSolved,
    TrainingEnded,
    WeightsPublished,
)
from tailrace_protos.subjects import PHASES, Phase
from tailrace_scheduler.config import SchedulerConfig
from tailrace_scheduler.core.decisions import (
    AdmitGroup,
    Decision,
    DrainServer,
    Emit,
    SettleMembers,
)
from tailrace_scheduler.core.ending import RunEnd
from tailrace_scheduler.core.evaluation import EvaluationPlan, evaluation_of
from tailrace_scheduler.core.flow import EpisodeFlow
from tailrace_scheduler.core.health import ServingState
from tailrace_scheduler.core.idle import IdleLedger, Situation
from tailrace_scheduler.core.lineage import Lineage
from tailrace_scheduler.core.run_health import Counts, Standing
from tailrace_scheduler.core.run_log import Change, CutIdle, Rows, RunLog
from tailrace_scheduler.core.streams.credit import EVALUATION, WEIGHTS
from tailrace_scheduler.core.tasks import TaskSource, TrainGroups
from tailrace_scheduler.core.vitals import Vitals
from tailrace_scheduler.ports import GroupPlan, StoredGroups


class SchedulerCore:
    """One run's scheduler."""

    def __init__(self, run: RunConfig, config: SchedulerConfig, now_s: float) -> None:
        self._run = run
        self._config = config
        self._tasks = TaskSource(
            run.seed,
            config.tags,
            config.num_groups_partition,
            config.eval_tags,
            config.eval_num_groups_partition,
        )
        self._lineage = Lineage()
        self._evaluations = EvaluationPlan(run, config, self._tasks)
        self._flow = EpisodeFlow(run, config)
        self._groups, self._health = self._flow.groups, self._flow.health
        self._activities = self._flow.activities
        self._idle = IdleLedger(now_s)
        self._log, self._replayed = RunLog(self._evaluations.is_due), Rows()
        self._vitals = Vitals(run, config, now_s)
        self._end = RunEnd(run.max_steps)
        self._train_groups = TrainGroups(run, config, self._tasks)
        self._stale_evaluations: set[str] = set()
        self.has_model = False
        """The learner has written the model card to Redis: it prepares the first weights now."""

    # Events

    def follow(self, events: Iterable[Event]) -> None:
        """Apply what another scheduler wrote to `events.jsonl`; unwatched idle time is unknown."""
        for event in events:
            self._replayed.extend(self._apply(event, event, lambda wall_s, busy_s: {}))

    def replay(self, events: Iterable[Event], now_s: float) -> Rows:
        """Apply the rest of `events.jsonl`; returns all rows of `metrics.jsonl` that it tells of."""
        self.follow(events)
        rows, self._replayed = self._replayed, Rows()
        self._idle = IdleLedger(now_s)
        self._log.begin_again(now_s)
        self._vitals.take_hints()
        self._end.begin_again(is_resumed=bool(self._run.resume_from_checkpoint))
        return rows

    def on_event(self, event: Event, now_s: float) -> list[Change]:
        """Apply a new event; returns what it changes in `metrics.jsonl`."""

        def cut_idle(wall_s: float, learner_busy_s: float) -> dict[str, float]:
            num_engines = len(self._health.alive(now_s))
            accounts = self._idle.cut(wall_s, learner_busy_s, num_engines)
            kinds = ("learner", "engine")
            return {f"{'busy' if name in kinds else 'idle'}/{name}": s for name, s in accounts.items()}

        body = event.body
        heard = msgspec.structs.replace(event, unix_s=now_s)  # the clock of Redis may differ from ours
        changes = self._apply(event, heard, cut_idle)
        if isinstance(body, LearnerResumed):
            self._flow.resume(body.step, self._lineage.waiting, now_s)
        elif not isinstance(body, StepFinished) or body.lineage == self._lineage.name:
            self._flow.feed.apply(body, now_s)
        return changes

    def learner_waits(self, num_places: int) -> None:
        """The learner keeps so many places of its step for open groups; 0: it does not wait."""
        self._flow.feed.learner_waits(num_places)

    def adopt(
        self,
        open_groups: Sequence[GroupPlan],
        next_group_index: int,
        queued: Collection[EpisodeTask],
        now_s: float,
    ) -> list[Decision]:
        """Take over what Redis knows after a restart; call it once all old events have been applied.

        `queued`: tasks in the work queue, read before the groups: an unsettled one that is not among
        them was never published, or lost. Returns evaluation groups that were not recorded.
        """
        self._vitals.health.begin(now_s)
        if next_group_index == 0 and self._train_groups.highest_index >= 0:
            self._lineage.forget()
            self._end.is_finished = False
        self._train_groups.next_index = max(next_group_index, self._lineage.next_group_index)
        lineage = self._lineage
        self._stale_evaluations |= self._evaluations.begin_again(open_groups)
        self._flow.adopt(open_groups, queued, lineage.step, now_s, lineage.waiting)
        return [
            AdmitGroup(plan)
            for event, closed in self._evaluations.unclosed()
            for plan in self._evaluations.groups_of(event, now_s)
            if plan.group_id not in closed and self._flow.open(plan, now_s)
        ]

    def on_status(self, status: ServerStatus, now_s: float) -> None:
        """An inference server's heartbeat."""
        before = self._flow.on_status(status, now_s)
        if before is not None:
            self._idle.heartbeat(self._situation(now_s), before, status)

    def on_activity(self, activity: AgentActivity, now_s: float) -> None:
        """Take the activity of an agents worker's episodes."""
        self._flow.on_activity(activity, now_s)

    def lease(self, request: LeaseRequest, now_s: float) -> LeaseReply:
        """Give servers to turns that do not stay where the last one was; the others wait for room."""
        return self._flow.lease(request, now_s)

    def on_lease_report(self, report: LeaseReport, now_s: float) -> None:
        """Take released episodes, the states of others, and the ends of calls."""
        self._flow.on_lease_report(report, now_s)

    def on_probed(self, server_id: str, succeeded: bool, now_s: float) -> None:
        """A probe of a server ended."""
        self._flow.feed.probed(server_id, succeeded, now_s)

    def lagging(self, now_s: float) -> dict[str, int]:
        """Policy versions of the servers that get no new episodes until they have caught up, by id."""
        return self._flow.lagging(now_s)

    # Decisions

    def decide(self, now_s: float) -> list[Decision]:
        """Return all decisions that are due; each comes once and must be carried out."""
        decided: list[Decision] = [*self._groups.due(now_s), *self._evaluations.results()]
        decided += [
            DrainServer(one.server_id, one.incarnation, "the learner found it to have wrong weights")
            for one in self._health.to_leave(now_s)
        ]
        decided += self._cancel_stale_evaluations()
        decided += [Emit(once, change) for once, change in self._vitals.take_hints()]
        if self._end.failed is not None:
            decided += [one for phase in PHASES for one in self._groups.cancel(phase, "the run failed")]
        elif self._lineage.started:
            decided += self._start_evaluation(now_s)
            if self._end.solved is not None:
                decided += self._groups.cancel("train", "the task is solved")
            elif self._lineage.step >= self._run.max_steps:
                decided += self._groups.cancel("train", "the run has made all its optimizer steps")
        decided += self._admit(now_s)
        decided += self._flow.decide(now_s)
        decided += self._end_run(now_s)
        self._idle.tick(self._situation(now_s), now_s)
        return decided

    def num_unsettled(self, phase: Phase) -> int:
        """Published episodes of a phase that have not ended; its queue should hold as many messages."""
        return self._groups.num_unsettled(phase)

    def reconcile(self, phase: Phase, queued: Collection[str] | None) -> list[Decision]:
        """Decisions on episodes that the phase's queue does not hold; None: it holds enough."""
        return self._flow.reconcile(phase, queued)

    def audit(self, stored: StoredGroups) -> list[Decision]:
        """Decisions on groups of which the store knows something else than we do."""
        return self._flow.audit(stored, self._lineage.waiting.sizes)

    # State

    @property
    def is_finished(self) -> bool:
        """Tell whether the run's log holds its end."""
        return self._end.is_finished

    @property
    def closes_early(self) -> bool:
        """Tell whether groups may close at the staleness horizon."""
        return self._flow.feed.closes_early

    @property
    def raised_hints(self) -> frozenset[str]:
        """Names of the health hints that hold."""
        return self._vitals.raised_hints

    @property
    def num_waiting(self) -> int:
        """Admitted episodes that wait for a server."""
        return self._groups.num_waiting

    @property
    def num_leases(self) -> int:
        """Leases held now."""
        return self._flow.num_leases

    def status(self, now_s: float) -> RunStatus:
        """The run for live views."""
        return self._vitals.status(self._standing(now_s), self._end, now_s)

    # Internals

    def _apply(self, event: Event, heard: Event, cut_idle: CutIdle) -> list[Change]:
        """Apply an event; `heard` has the time of this process, with which silence is measured."""
        self._vitals.apply(heard)
        self._flow.apply(event.body)
        match event.body:
            case EpisodeSettled(phase="eval") as body:
                self._evaluations.settle(body)
            case GroupClosed() as body:
                self._groups.close(body.group_id)
                self._lineage.closed(body)
                self._evaluations.close(body)
            case ServerQuarantined(server_id=server_id, incarnation=incarnation):
                self._health.distrust(server_id, incarnation)
            case GroupAdmitted(phase="train", group_index=index):
                self._train_groups.admitted(index)
            case _:
                self._apply_rare(event)
        return self._log.apply(event, cut_idle)

    def _apply_rare(self, event: Event) -> None:
        match event.body:
            case StepFinished() as body:
                self._stepped(body)
            case GroupDropped() as body:
                self._lineage.dropped(body)
            case LearnerResumed() as body:
                self._resumed(body)
            case WeightsPublished() as body:
                self._lineage.published(body)
            case CheckpointSaved() as body:
                self._lineage.saved(body)
            case EvaluationStarted() as body:
                self._evaluations.started(body)
            case EvaluationFinished() as body:
                self._evaluations.finished(body)
            case RunFinished() | RunFailed() as body:
                self._end.ended(body)
            case TaskSolved() | TrainingEnded() as body if body.lineage == self._lineage.name:
                self._ends_early(body)

    def _ends_early(self, body: TaskSolved | TrainingEnded) -> None:
        self._end.ends_early(body)
        if isinstance(body, TrainingEnded):
            self._evaluations.end_at(body.step)

    def _stepped(self, body: StepFinished) -> None:
        if self._lineage.stepped(body):
            self._evaluations.reached(body.step)

    def _resumed(self, body: LearnerResumed) -> None:
        self._lineage.resumed(body)
        self._train_groups.resumed(body)
        self._stale_evaluations |= self._evaluations.resumed(body.step)
        self._end.resumed()

    def _servers(self, now_s: float) -> ServingState:
        return self._health.serving(self._lineage.policy_version, now_s)

    def _situation(self, now_s: float) -> Situation:
        return Situation(
            blocked_by=self._blocked_by,
            num_open_episodes=sum(self._groups.num_unsettled(phase) for phase in PHASES),
            activity=self._activities.counts(now_s),
            newest_policy_version=self._lineage.policy_version,
            learner_has_work=self._lineage.num_ready >= self._run.groups_per_step,
        )

    def _start_evaluation(self, now_s: float) -> list[Decision]:
        started = self._evaluations.next_start(
            self._lineage.version_of, self._servers(now_s), self._groups.num_open("train")
        )
        if started is None:
            return []
        self._evaluations.started(started)
        plans = self._evaluations.groups_of(started, now_s)
        begin = Emit(f"started/{started.evaluation_id}", started)
        return [begin, *(AdmitGroup(plan) for plan in plans if self._flow.open(plan, now_s))]

    def _admit(self, now_s: float) -> list[Decision]:
        name, step = self._lineage.name, self._lineage.step
        may_train = self._lineage.started and self._evaluations.first_done and not self._is_over
        last_step = self._evaluations.barrier(step) if may_train else step
        num_groups = self._flow.admit(last_step, self._lineage.policy_version, now_s)
        plans = [self._train_groups.next(name, step, now_s) for _ in range(num_groups)]
        for plan in plans:
            self._flow.open(plan, now_s)
        return [AdmitGroup(plan) for plan in plans]

    @property
    def _is_over(self) -> bool:
        """No training group is admitted any more, or the run failed."""
        return self._end.failed is not None or self._end.is_over(self._lineage.step)

    @property
    def _blocked_by(self) -> str:
        """Bound that withholds admission."""
        if not self._lineage.started:
            return WEIGHTS
        is_training = self._evaluations.first_done and not self._end.is_over(self._lineage.step)
        return self._flow.feed.blocked_by if is_training else EVALUATION

    def _cancel_stale_evaluations(self) -> list[SettleMembers]:
        if not self._stale_evaluations:
            return []
        stale, self._stale_evaluations = self._stale_evaluations, set()
        reason = "its evaluation was taken back: the learner went back, or settings have changed"
        return self._groups.cancel("eval", reason, lambda group: evaluation_of(group) in stale)

    def _end_run(self, now_s: float) -> list[Decision]:
        if self._end.is_decided:
            return []
        name, step, health = self._lineage.name, self._lineage.step, self._vitals.health
        is_done, verdict = self._is_done(step), health.verdict(now_s, self._standing(now_s))
        if verdict is None and is_done:
            verdict = health.final_verdict(step)
        end = self._end.decide(name, step, verdict, is_done=is_done, reason=health.finish())
        return [*self._end.decide_solved(None if end else health.solved(name, step)), *end]

    def _is_done(self, step: int) -> bool:
        is_saved = step == 0 or self._lineage.checkpoint_step >= step
        is_over = self._end.is_last(step) and self._evaluations.is_finished(step)
        quiet = self._evaluations.settled_all and not self._groups.num_open("train")
        return self._lineage.started and is_over and is_saved and quiet

    def _standing(self, now_s: float) -> Standing:
        servers, lineage = self._servers(now_s), self._lineage
        counts = Counts(
            step=lineage.step,
            policy_version=lineage.newest_version,
            num_episodes_running=self._activities.counts(now_s).total,
            num_groups_running=sum(map(self._groups.num_open, PHASES)),
            num_groups_ready=lineage.num_ready,
            num_servers=servers.num_healthy,
            phase=self._end.phase(lineage, self._evaluations.first_done, self.has_model),
            blocked_by=self._blocked_by if lineage.started else "",
        )
        has_work = lineage.num_ready >= self._run.groups_per_step
        num_open = sum(map(self._groups.num_unsettled, PHASES))
        num_waiting = self._activities.num_waiting(now_s)
        return Standing(
            counts,
            lineage.started,
            servers.is_current,
            has_work,
            num_open,
            num_waiting,
            self._flow.short_server(now_s),
        )
