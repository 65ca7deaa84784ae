"""A world without processes around the scheduler's core: it carries decisions out as events.

Everything happens in one thread in an order that a `random.Random` chooses, so that a failing history
can be repeated from its seed. The world keeps its own books and checks the core's promises on them.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import msgspec

from tailrace.config import RunConfig
from tailrace_protos.control import ServerState, ServerStatus
from tailrace_protos.episode import EpisodeTask, Outcome
from tailrace_protos.event import (
    CheckpointSaved,
    EpisodeSettled,
    EvaluationStarted,
    Event,
    EventBody,
    GroupAdmitted,
    GroupClosed,
    GroupDropped,
    LearnerResumed,
    StepFinished,
    TrainingEnded,
    WeightsPublished,
)
from tailrace_scheduler.config import SchedulerConfig
from tailrace_scheduler.core.decisions import (
    AdmitGroup,
    Decision,
    Emit,
    EndTraining,
    PublishEpisode,
    SettleMembers,
)
from tailrace_scheduler.core.run_log import Change
from tailrace_scheduler.core.scheduler import SchedulerCore
from tailrace_scheduler.ports import GroupPlan


def made_status(
    server_id: str = "inference-0",
    policy_version: int = 0,
    heartbeat_unix_s: float = 0.0,
    state: ServerState = ServerState.READY,
    idle_s: float = 0.0,
    busy_s: float = 0.0,
    incarnation: str = "",
) -> ServerStatus:
    return ServerStatus(
        server_id=server_id,
        state=state,
        nats_subject=f"x.{server_id}",
        zmq_endpoint="",
        host_id="h",
        policy_version=policy_version,
        capacity_tokens=1 << 24,
        max_running=256,
        num_running=0,
        num_waiting=0,
        num_failed=0,
        idle_s=idle_s,
        busy_s=busy_s,
        heartbeat_unix_s=heartbeat_unix_s,
        incarnation=incarnation,
    )


def made_settlement(
    group_id: str, member: int, outcome: Outcome = Outcome.OK, reward: float = 0.0
) -> EpisodeSettled:
    return EpisodeSettled(
        episode_id=f"{group_id}.{member}",
        group_id=group_id,
        member=member,
        phase="eval" if group_id.startswith("e") else "train",
        outcome=outcome,
        reason="",
        reward=reward,
        success=reward,
        num_sampled_tokens=1,
        num_turns=1,
        min_policy_version=0,
        max_policy_version=0,
        started_unix_s=0.0,
        finished_unix_s=0.0,
    )


@dataclass
class Group:
    plan: GroupPlan
    settled: dict[int, Outcome] = field(default_factory=dict)


class SimulatedRun:
    """Redis, learner, agents and one server, as far as the core can tell."""

    def __init__(self, run: RunConfig, config: SchedulerConfig, seed: int) -> None:
        self.run = run
        self.config = config
        self.random = random.Random(seed)
        self.now_s = 1000.0
        self.core = SchedulerCore(run, config, self.now_s)
        self.events: list[Event] = []
        self.changes: list[Change] = []
        self.open: dict[str, Group] = {}
        self.closed: set[str] = set()
        self.emitted: set[str] = set()
        self.ready: list[str] = []
        self.retained: list[tuple[int, str]] = []  # (step, group id), trained and in no checkpoint
        self.trained: dict[str, int] = {}  # of the surviving lineage
        self.next_index = 0
        self.lineage = 0
        self.step = 0
        self.saved_step = 0
        self.policy_version = -1
        self.served_version = -1
        self.queue: dict[str, EpisodeTask] = {}  # published and not settled
        self.published: set[str] = set()  # message ids
        self.reward: float | None = None  # of every episode; None: 0 or 1
        self.ended_lineage = ""  # that the scheduler has ended

    # What the world does

    def happen(self, body: EventBody) -> None:
        event = Event(f"{len(self.events)}-0", self.now_s, "test", body)
        self.events.append(event)
        self.changes += self.core.on_event(event, self.now_s)

    def resume(self, step: int) -> None:
        self.lineage += 1
        self.step = step
        lost = [group for at, group in self.retained if at > step]
        self.retained = [(at, group) for at, group in self.retained if at <= step]
        self.ready = lost + self.ready
        self.trained = {group: at for group, at in self.trained.items() if at <= step}
        self.publish()
        checkpoint = f"step_{step}" if step else ""
        self.happen(LearnerResumed(f"L{self.lineage}", step, 0, checkpoint))

    def publish(self) -> None:
        self.policy_version += 1
        self.happen(WeightsPublished(self.policy_version, f"L{self.lineage}", self.step, 1))

    def beat(self) -> None:
        self.core.on_status(
            made_status(policy_version=self.served_version, heartbeat_unix_s=self.now_s), self.now_s
        )

    def play(self, group_id: str, member: int, outcome: Outcome) -> None:
        """A worker settles an episode; it can play only what was published."""
        if f"{group_id}.{member}" in self.queue:
            self.settle(group_id, member, outcome)

    def play_all(self, outcome: Outcome = Outcome.OK) -> None:
        """Workers settle all that is published."""
        for task in list(self.queue.values()):
            self.play(task.group_id, task.member, outcome)

    def settle(self, group_id: str, member: int, outcome: Outcome) -> None:
        group = self.open.get(group_id)
        if group is None or member in group.settled:
            return
        self.queue.pop(f"{group_id}.{member}", None)
        group.settled[member] = outcome
        reward = float(self.random.random() < 0.5) if self.reward is None else self.reward
        self.happen(made_settlement(group_id, member, outcome, reward))
        if len(group.settled) == len(group.plan.tasks):
            self._close(group)

    def make_step(self) -> bool:
        per_step = self.run.groups_per_step
        if len(self.ready) < per_step or self.step >= self.run.max_steps:
            return False
        used, self.ready = self.ready[:per_step], self.ready[per_step:]
        self.step += 1
        for group_id in used:
            assert group_id not in self.trained, "trained twice"
            self.trained[group_id] = self.step
        self.retained += [(self.step, group_id) for group_id in used]
        version = self.policy_version + 1
        self.happen(StepFinished(f"L{self.lineage}", self.step, version, tuple(used), 0, 0.0, 0.0, {}))
        self.publish()
        return True

    def save(self) -> None:
        self.saved_step = self.step
        self.retained = []
        self.happen(CheckpointSaved(f"L{self.lineage}", self.step, "p", 0))

    def drop(self, reason: str = "stale") -> None:
        if self.ready:
            self.happen(GroupDropped(self.ready.pop(0), reason))

    def end_training(self) -> None:
        """The learner does what the scheduler asks it to: it saves, and makes no further step."""
        if self.ended_lineage == f"L{self.lineage}":
            self.save()
            self.happen(TrainingEnded(self.ended_lineage, self.step))
            self.ended_lineage = ""

    # What the core decides

    def decide(self) -> None:
        decisions = self.core.decide(self.now_s)
        is_pinned = self.config.pins_evaluations(self.run)
        if self.core.status(self.now_s).blocked_by == "credit" and not is_pinned:
            plans = [one.plan for one in decisions if isinstance(one, AdmitGroup)]
            self._check_credit_is_used(sum(plan.phase == "train" for plan in plans))
        for decision in decisions:
            self.carry_out(decision)

    def carry_out(self, decision: Decision) -> None:
        match decision:
            case AdmitGroup(plan):
                self._record(plan)
            case PublishEpisode(task):
                assert task.group_id in self.open, "published before it was recorded"
                assert task.message_id not in self.published, "published twice"
                assert task.lease is not None
                self.published.add(task.message_id)
                self.queue[task.episode_id] = task
            case SettleMembers(group_id, members, outcome, _):
                for member in members:
                    self.settle(group_id, member, outcome)
            case EndTraining(lineage):
                self.ended_lineage = lineage
            case Emit(once, body) if once not in self.emitted:
                self.emitted.add(once)
                self._check_evaluation(body)
                self.happen(body)

    def restart(self) -> None:
        """The scheduler dies and another, which has followed a part of its log, takes over."""
        self.core = SchedulerCore(self.run, self.config, self.now_s)
        num_followed = len(self.events) // 2
        self.core.follow(self.events[:num_followed])
        self.core.replay(self.events[num_followed:], self.now_s)
        plans = [
            msgspec.structs.replace(group.plan, settled=dict(group.settled))
            for group in self.open.values()
        ]
        for decision in self.core.adopt(plans, self.next_index, list(self.queue.values()), self.now_s):
            self.carry_out(decision)
        self.beat()

    # What must hold

    def _check_admission(self) -> None:
        """Right after a train group was admitted: neither credit nor the buffer's bound is exceeded."""
        running = sum(group.plan.phase == "train" for group in self.open.values())
        accepted = self.step * self.run.groups_per_step + len(self.ready)
        served_step = max(self.step - max(self.policy_version - self.served_version, 0), 0)
        last_step = self.run.max_staleness + served_step + 1  # that may train what begins now
        assert accepted + running <= last_step * self.run.groups_per_step
        assert accepted + running <= self.run.max_steps * self.run.groups_per_step
        assert running + len(self.ready) <= self.config.max_buffered_groups
        assert self.run.max_staleness > 0 or self.served_version == self.policy_version

    def _check_credit_is_used(self, num_admitted: int) -> None:
        """What withholds admission is held by groups that run or wait, not by ones that ended."""
        running = num_admitted + sum(group.plan.phase == "train" for group in self.open.values())
        last_step = min(self.run.max_staleness + self.step + 1, self.run.max_steps)
        needed = (last_step - self.step) * self.run.groups_per_step
        assert running + len(self.ready) >= needed, "groups that ended hold credit"

    def _check_evaluation(self, body: EventBody) -> None:
        if not isinstance(body, EvaluationStarted):
            return
        assert self.served_version >= 0
        is_last = body.step >= self.run.max_steps and body.step > 0
        if is_last:
            assert self.served_version == self.policy_version
            assert not any(group.plan.phase == "train" for group in self.open.values())

    def _record(self, plan: GroupPlan) -> None:
        if plan.group_id in self.open or plan.group_id in self.closed:
            return
        if plan.phase == "train":
            self.next_index = max(self.next_index, plan.group_index + 1)
        self.open[plan.group_id] = Group(plan)
        if plan.phase == "train":
            self._check_admission()
        self.happen(
            GroupAdmitted(plan.group_id, plan.group_index, plan.phase, len(plan.tasks), plan.step)
        )

    def _close(self, group: Group) -> None:
        plan = group.plan
        del self.open[plan.group_id]
        self.closed.add(plan.group_id)
        num_valid = sum(outcome.is_valid for outcome in group.settled.values())
        sent = plan.phase == "train" and num_valid >= plan.min_valid
        if sent:
            self.ready.append(plan.group_id)
        self.happen(
            GroupClosed(plan.group_id, plan.phase, num_valid, len(plan.tasks), sent, 100 if sent else 0)
        )
