"""The scheduler's decisions as one state machine: events, reports and time in, decisions out.

Invariants: training credit is never exceeded; every admitted group closes; an event applied twice
changes nothing the second time; the same events in the same order give the same state, so that a
restart is a replay of `events.jsonl` and a look at the groups that Redis has open.
`now_s` is unix time everywhere and never read from a clock here.
"""

from collections.abc import Collection, Iterable, Sequence

from tailrace.config import RunConfig
from tailrace_protos.control import (
    AgentActivity,
    LeaseReply,
    LeaseReport,
    LeaseRequest,
    RunStatus,
    ServerStatus,
)
from tailrace_protos.event import (
    CheckpointSaved,
    EpisodeRedelivered,
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
    WeightsPublished,
)
from tailrace_protos.subjects import PHASES, Phase
from tailrace_scheduler.config import SchedulerConfig
from tailrace_scheduler.core.admission import (
    EVALUATION,
    WEIGHTS,
    AdmissionRule,
    BufferState,
    ServerView,
    is_current,
)
from tailrace_scheduler.core.decisions import AdmitGroup, Decision, DrainServer, Emit, SettleMembers
from tailrace_scheduler.core.evaluation import EvaluationPlan, evaluation_of
from tailrace_scheduler.core.groups import GroupBook, Reconciler
from tailrace_scheduler.core.health import ServerHealth
from tailrace_scheduler.core.idle import Activities, IdleLedger, Situation
from tailrace_scheduler.core.lineage import Lineage
from tailrace_scheduler.core.placement import Placement
from tailrace_scheduler.core.run_health import WARM_START, Counts, Standing
from tailrace_scheduler.core.run_log import Change, CutIdle, RunLog
from tailrace_scheduler.core.tasks import TaskSource
from tailrace_scheduler.core.vitals import Vitals
from tailrace_scheduler.ports import GroupPlan


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
        self._rule = AdmissionRule(run, config)
        self._lineage = Lineage()
        self._groups = GroupBook()
        self._evaluations = EvaluationPlan(run, config, self._tasks)
        self._health = ServerHealth(config.server_timeout_s)
        self._placement = Placement(self._health, config.lease_ttl_s)
        self._activities = Activities(config.lease_ttl_s)
        self._idle = IdleLedger(now_s)
        self._reconcilers = {phase: Reconciler(config.max_attempts) for phase in PHASES}
        self._log = RunLog(self._evaluations.is_due)
        self._vitals = Vitals(run, config, now_s)
        self._failed: RunFailed | None = None
        self._num_failed_ends = 0  # of the run, in its log
        self._next_index = 0  # of train groups
        self._highest_index = -1  # ever admitted, also in a Redis that is gone
        self._stale_evaluations: set[str] = set()
        self._blocked_by = WEIGHTS
        self._is_finished = self._end_decided = False
        self.has_model = False
        """The learner has written the model card to Redis: it prepares the first weights now."""

    # Events

    def replay(self, events: Iterable[Event]) -> list[Change]:
        """Apply what `events.jsonl` holds; idle time of intervals not watched is unknown."""
        changes = [
            change for event in events for change in self._apply(event, lambda wall_s, busy_s: {})
        ]
        self._vitals.take_hints()
        self._failed = None  # a run that is started again may succeed
        return changes

    def on_event(self, event: Event, now_s: float) -> list[Change]:
        """Apply a new event; returns what it changes in `metrics.jsonl`."""

        def cut_idle(wall_s: float, learner_busy_s: float) -> dict[str, float]:
            num_engines = len(self._health.alive(now_s))
            accounts = self._idle.cut(wall_s, learner_busy_s, num_engines)
            kinds = ("learner", "engine")
            return {f"{'busy' if name in kinds else 'idle'}/{name}": s for name, s in accounts.items()}

        return self._apply(event, cut_idle)

    def adopt(
        self, open_groups: Sequence[GroupPlan], next_group_index: int, now_s: float
    ) -> list[Decision]:
        """Take over what Redis knows after a restart; call it once all old events have been applied.

        Returns what a scheduler that died between recording a group and publishing it left undone.
        """
        self._vitals.health.begin(now_s)
        if next_group_index == 0 and self._highest_index >= 0:
            self._lineage.forget()
            self._is_finished = False
        self._next_index = max(next_group_index, self._lineage.next_group_index)
        for plan in open_groups:
            self._groups.add(plan)
            # Whether one still waits for an agent outside is told by the workers' next reports.
            self._groups.postpone(plan.group_id, now_s + self._config.lease_ttl_s)
        return [
            AdmitGroup(plan)
            for event, closed in self._evaluations.unclosed()
            for plan in self._evaluations.groups_of(event, now_s)
            if plan.group_id not in closed and self._groups.add(plan)
        ]

    def on_status(self, status: ServerStatus, now_s: float) -> None:
        """An inference server's heartbeat."""
        before = self._health.heard(status, now_s)
        if before is not None:
            self._idle.heartbeat(self._situation(now_s), before, status)

    def on_activity(self, activity: AgentActivity, now_s: float) -> None:
        """Take the activity of an agents worker's episodes."""
        self._activities.heard(activity, now_s)
        self._placement.heard(activity.worker_id, now_s)
        for group_id in activity.waiting_groups:
            self._groups.postpone(group_id, now_s + self._config.group_timeout_s)

    def lease(self, request: LeaseRequest, now_s: float) -> LeaseReply:
        """Place episodes on inference servers."""
        return self._placement.lease(request, now_s)

    def on_lease_report(self, report: LeaseReport, now_s: float) -> None:
        """Take released and failed leases."""
        self._placement.report(report, now_s)

    # Decisions

    def decide(self, now_s: float) -> list[Decision]:
        """Return all decisions that are due; each comes once and must be carried out."""
        self._placement.expire(now_s)
        decided: list[Decision] = [*self._groups.due(now_s), *self._evaluations.results()]
        decided += [
            DrainServer(one.server_id, one.incarnation, "the learner found it to have wrong weights")
            for one in self._health.to_leave(now_s)
        ]
        decided += self._cancel_stale_evaluations()
        decided += [Emit(once, change) for once, change in self._vitals.take_hints()]
        if self._failed is not None:
            decided += [one for phase in PHASES for one in self._groups.cancel(phase, "the run failed")]
        elif self._lineage.started:
            decided += self._start_evaluation(now_s)
            decided += self._admit(now_s)
        decided += self._end(now_s)
        self._idle.tick(self._situation(now_s), now_s)
        return decided

    def num_unsettled(self, phase: Phase) -> int:
        """Episodes of a phase that have not ended; as many messages its queue should hold at least."""
        return self._groups.num_unsettled(phase)

    def reconcile(self, phase: Phase, queued: Collection[str] | None) -> list[Decision]:
        """Decisions on episodes that the phase's queue does not hold; None: it holds enough."""
        reconciler = self._reconcilers[phase]
        if queued is None:
            reconciler.balanced()
            return []
        groups = [group for group in self._groups if group.plan.phase == phase]
        return [*reconciler.compare(groups, queued, self._placement.holds)]

    # State

    @property
    def is_finished(self) -> bool:
        """Tell whether the run's log holds its end."""
        return self._is_finished

    @property
    def num_leases(self) -> int:
        """Leases held now."""
        return self._placement.num_leases

    def was_admitted_after(self, plan: GroupPlan, unix_s: float) -> bool:
        """Tell whether a group was admitted later than `unix_s`."""
        return plan.deadline_unix_s - self._config.group_timeout_s > unix_s

    def status(self, now_s: float) -> RunStatus:
        """The run for live views."""
        return self._vitals.status(self._standing(now_s), self._failed, now_s)

    # Internals

    def _apply(self, event: Event, cut_idle: CutIdle) -> list[Change]:
        self._vitals.apply(event)
        match event.body:
            case EpisodeSettled() as body:
                self._settled(body)
            case GroupClosed() as body:
                self._groups.close(body.group_id)
                self._lineage.closed(body)
                self._evaluations.close(body)
            case ServerQuarantined(server_id=server_id, incarnation=incarnation):
                self._health.distrust(server_id, incarnation)
            case GroupAdmitted(phase="train", group_index=index):
                self._highest_index = max(self._highest_index, index)
            case _:
                self._apply_rare(event)
        return self._log.apply(event, cut_idle)

    def _apply_rare(self, event: Event) -> None:
        match event.body:
            case StepFinished() as body:
                self._stepped(body)
            case EpisodeRedelivered() as body:
                self._groups.redeliver(body)
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
                self._ended(body)

    def _ended(self, body: RunFinished | RunFailed) -> None:
        if isinstance(body, RunFailed):
            self._failed = body
            self._num_failed_ends += 1
        else:
            self._is_finished = body.step >= self._run.max_steps

    def _stepped(self, body: StepFinished) -> None:
        if self._lineage.stepped(body):
            self._evaluations.reached(body.step)

    def _resumed(self, body: LearnerResumed) -> None:
        self._lineage.resumed(body)
        self._next_index = max(self._next_index, body.next_group_index)
        self._stale_evaluations |= self._evaluations.resumed(body.step)
        self._is_finished = self._end_decided = False

    def _settled(self, body: EpisodeSettled) -> None:
        self._groups.settle(body)
        self._placement.release(body.episode_id)
        if body.phase == "eval":
            self._evaluations.settle(body)

    def _servers(self, now_s: float) -> ServerView:
        versions = [status.policy_version for status in self._health.alive(now_s)]
        return ServerView(len(versions), min(versions, default=-1), self._lineage.policy_version)

    def _buffer(self) -> BufferState:
        return BufferState(
            optimizer_step=self._lineage.step,
            num_running=self._groups.num_open("train"),
            num_ready=self._lineage.num_ready,
            ready_bytes=self._lineage.ready_bytes,
            mean_group_bytes=self._lineage.mean_group_bytes,
            last_step=self._evaluations.barrier(self._lineage.step),
        )

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
        return [begin, *(AdmitGroup(plan) for plan in plans if self._groups.add(plan))]

    def _admit(self, now_s: float) -> list[Decision]:
        if self._lineage.step >= self._run.max_steps:
            self._blocked_by = EVALUATION
            return list(self._groups.cancel("train", "the run has made all its optimizer steps"))
        if not self._evaluations.first_done:
            self._blocked_by = EVALUATION
            return []
        servers = self._servers(now_s)
        admission = self._rule.admit(self._buffer(), servers)
        plans = [self._next_plan(now_s) for _ in range(admission.num_groups)]
        for plan in plans:
            self._groups.add(plan)
        self._blocked_by = admission.blocked_by or self._rule.admit(self._buffer(), servers).blocked_by
        return [AdmitGroup(plan) for plan in plans]

    def _next_plan(self, now_s: float) -> GroupPlan:
        index = self._next_index
        self._next_index += 1
        again = f"-{self._lineage.name[:16]}" if index <= self._highest_index else ""
        return GroupPlan(
            group_id=f"t{index:08d}{again}",
            group_index=index,
            phase="train",
            tasks=(self._tasks.train_task(index),) * self._run.group_size,
            deadline_unix_s=now_s + self._config.group_timeout_s,
            timeout_s=self._config.group_timeout_s,
            min_valid=self._config.needed_valid(self._run.group_size),
            step=self._lineage.step,
        )

    def _cancel_stale_evaluations(self) -> list[SettleMembers]:
        if not self._stale_evaluations:
            return []
        stale, self._stale_evaluations = self._stale_evaluations, set()
        reason = "the learner resumed from an earlier step"
        return self._groups.cancel("eval", reason, lambda group: evaluation_of(group) in stale)

    def _end(self, now_s: float) -> list[Decision]:
        """The one end of the run: it has failed, or all is done."""
        if self._end_decided or self._is_finished or self._failed is not None:
            return []
        step, health = self._lineage.step, self._vitals.health
        is_done = self._is_done(step)
        failed = health.verdict(now_s, self._standing(now_s))
        if failed is None and is_done:
            failed = health.final_verdict(step)
        self._end_decided = is_done or failed is not None
        if failed is not None:
            return [Emit(f"run_failed/{self._num_failed_ends}", failed)]
        if not is_done:
            return []
        done = RunFinished(step, "all steps, the final checkpoint and the final evaluation are done")
        return [Emit(f"run_finished/{self._lineage.name}/{step}", done)]

    def _is_done(self, step: int) -> bool:
        is_saved = step == 0 or self._lineage.checkpoint_step >= step
        is_over = step >= self._run.max_steps and self._evaluations.is_finished(step)
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
            phase=self._phase(),
            blocked_by=self._blocked_by if lineage.started else "",
        )
        has_work = lineage.num_ready >= self._run.groups_per_step
        num_open = sum(map(self._groups.num_unsettled, PHASES))
        num_waiting = self._activities.num_waiting(now_s)
        return Standing(counts, lineage.started, is_current(servers), has_work, num_open, num_waiting)

    def _phase(self) -> str:
        if self._failed is not None:
            return "failed"
        if not self._lineage.started:
            return WARM_START if self.has_model else "starting"
        if self._is_finished:
            return "finished"
        if self._lineage.step >= self._run.max_steps:
            return "finishing"
        return "training" if self._evaluations.first_done else "evaluating"
