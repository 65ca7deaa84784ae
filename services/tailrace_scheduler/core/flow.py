"""Flow of episodes: from an admitted group to its members' servers, turns and settlements.

Invariants: an episode is published once `StreamCore` has found a server for it, with that server in its
task; what waits is a range of its group. What is published and neither in the work queue nor at a live
worker goes out again as a new attempt.
"""

from collections.abc import Collection, Iterable, Mapping

from tailrace.config import RunConfig
from tailrace_protos.control import (
    AgentActivity,
    LeaseReply,
    LeaseReport,
    LeaseRequest,
    ServerState,
    ServerStatus,
)
from tailrace_protos.episode import EpisodeTask, Lease
from tailrace_protos.event import EpisodeRedelivered, EpisodeSettled, EventBody
from tailrace_protos.subjects import PHASES, Phase
from tailrace_scheduler.config import SchedulerConfig
from tailrace_scheduler.core.decisions import BeginGroups, Decision, PublishEpisode
from tailrace_scheduler.core.groups import GroupBook, Reconciler, StoreAudit
from tailrace_scheduler.core.health import EpisodeRoom, ServerHealth
from tailrace_scheduler.core.idle import Activities
from tailrace_scheduler.core.leases import WorkerLeases
from tailrace_scheduler.core.lineage import NONE_WAITING, WaitingGroups
from tailrace_scheduler.core.streaming import StreamFeed
from tailrace_scheduler.core.streams import decisions as streams
from tailrace_scheduler.ports import GroupPlan, StoredGroups

HOLD_S = 0.25  # a turn that waits for room asks again after this time


class EpisodeFlow:
    """Open groups, the workers and servers that play them, and `StreamCore`."""

    def __init__(self, run: RunConfig, config: SchedulerConfig) -> None:
        self._config = config
        self.groups = GroupBook()
        self.health = ServerHealth(config.server_timeout_s, config.version_spread(run))
        self.activities = Activities(config.lease_ttl_s)
        self.feed = StreamFeed(run, config)
        self._leases = WorkerLeases(config.lease_ttl_s)
        self._room = EpisodeRoom()
        self._audit = StoreAudit()
        self._reconcilers = {phase: Reconciler(config.max_attempts) for phase in PHASES}

    @property
    def num_leases(self) -> int:
        """Episodes at live workers."""
        return len(self._leases)

    # Groups.

    def open(self, plan: GroupPlan, now_s: float) -> bool:
        """Take a new group; False for a known one."""
        group = self.groups.add(plan)
        if group is not None:
            self.feed.opened(group, now_s)
        return group is not None

    def adopt(
        self,
        plans: Iterable[GroupPlan],
        queued: Iterable[EpisodeTask],
        step: int,
        now_s: float,
        waiting: WaitingGroups = NONE_WAITING,
    ) -> None:
        """Take over the groups that are open, and the tasks in the work queue, after a restart."""
        of_group: dict[str, dict[int, EpisodeTask]] = {}
        for task in queued:
            of_group.setdefault(task.group_id, {})[task.member] = task
        for plan in plans:
            self.groups.add(plan, of_group.get(plan.group_id, {}))
            # Its time begins anew: nobody may have played while the run was stopped. Whether one still
            # waits for an agent outside is told by the workers' next reports.
            timeout_s = max(plan.timeout_s, self._config.lease_ttl_s)
            self.groups.postpone(plan.group_id, now_s + timeout_s)
        self.feed.begin(step, self.groups, now_s, waiting)

    def apply(self, body: EventBody) -> None:
        """Take an event, a new one or one of the log."""
        match body:
            case EpisodeSettled():
                self.groups.settle(body)
                self._leases.end(body.episode_id)
            case EpisodeRedelivered():
                self.groups.redeliver(body)

    def resume(self, step: int, waiting: WaitingGroups, now_s: float) -> None:
        """A learner goes on from a step, with these groups before it."""
        self.feed.begin(step, self.groups, now_s, waiting)

    def reconcile(self, phase: Phase, queued: Collection[str] | None) -> list[Decision]:
        """Decisions on published episodes that the queue does not hold; None: it holds enough."""
        reconciler = self._reconcilers[phase]
        if queued is None:
            reconciler.balanced()
            return []
        groups = [group for group in self.groups if group.plan.phase == phase]
        return [*reconciler.compare(groups, queued, self._leases.holds)]

    def audit(self, stored: StoredGroups, waiting: Collection[str]) -> list[Decision]:
        """Decisions on groups of which the store and we know different things."""
        return [*self._audit.compare(self.groups, waiting, stored)]

    # Workers and servers.

    def on_status(self, status: ServerStatus, now_s: float) -> ServerStatus | None:
        """Take a server's heartbeat; returns the one before."""
        before = self.health.heard(status, now_s)
        if status.state is ServerState.DRAINING or self.health.is_alive(status.server_id, now_s):
            self.feed.heard(status, now_s)
        return before

    def on_activity(self, activity: AgentActivity, now_s: float) -> None:
        """Take the activity of an agents worker's episodes."""
        self.activities.heard(activity, now_s)
        self._leases.heard(activity.worker_id, now_s)
        self.feed.limited(activity.context_limit, now_s)
        self._room.worker_said(activity.context_limit)
        for group_id in activity.waiting_groups:
            self.groups.postpone(group_id, now_s + self._config.group_timeout_s)

    def lease(self, request: LeaseRequest, now_s: float) -> LeaseReply:
        """Give servers to turns that do not stay where the last one was; the others wait for room."""
        self._leases.take(request.worker_id, request.episode_ids, now_s)
        self._look_at_servers(now_s)
        servers = self.feed.lease(request, now_s)
        leases = tuple(self._lease(one, server_id) for one, server_id in servers.items())
        return LeaseReply(leases, HOLD_S if len(leases) < len(request.episode_ids) else 0.0)

    def on_lease_report(self, report: LeaseReport, now_s: float) -> None:
        """Take released episodes, the states of others, and the ends of calls."""
        self.feed.released(self._leases.report(report, now_s), now_s)
        self.feed.told(report, now_s)

    def lagging(self, now_s: float) -> dict[str, int]:
        """Policy versions of the servers that get no new episodes until they have caught up, by id."""
        lagging = self.health.lagging(now_s, self.feed.suspended)
        return {one.server_id: one.policy_version for one in lagging}

    def short_server(self, now_s: float) -> str:
        """Text on a server whose sequences end before the longest episode; empty if there is none."""
        return self._room.short_server(self.health.alive(now_s))

    # Decisions.

    def admit(self, last_step: int, newest_policy_version: int, now_s: float) -> int:
        """Return the training groups to open now; none is for a step after `last_step`."""
        self._look_at_servers(now_s)
        self.feed.bound(last_step, newest_policy_version, now_s)
        return self.feed.admit()

    def decide(self, now_s: float) -> list[Decision]:
        """Starts of episodes, probes, and groups that close at the staleness horizon."""
        self.feed.released(self._leases.expire(now_s), now_s)
        self._look_at_servers(now_s)
        decided = self.feed.decide(self._rooms(now_s), now_s)
        starts = [one for one in decided if isinstance(one, streams.StartEpisode)]
        others = [one for one in decided if not isinstance(one, streams.StartEpisode)]
        return [*self.groups.close_early(others), *self._start(starts, now_s)]

    def _look_at_servers(self, now_s: float) -> None:
        self.feed.use_servers(self.health.present(now_s), self.lagging(now_s), now_s)

    def _rooms(self, now_s: float) -> Mapping[Phase, int]:
        """Episodes that may be published now: workers can play them, or take them soon."""
        rooms = {}
        for phase, num_episodes in self.activities.max_episodes(now_s).items():
            ahead = max(num_episodes // 4, 8) if num_episodes else 0
            rooms[phase] = num_episodes + ahead - self.groups.num_unsettled(phase)
        return rooms

    def _start(self, starts: Iterable[streams.StartEpisode], now_s: float) -> list[Decision]:
        """Publish episodes; groups that begin with them are noted before."""
        begun: list[tuple[str, int]] = []
        started: list[PublishEpisode] = []
        for one in starts:
            found = self.groups.publish(one.episode_id, now_s)
            if found is None:
                continue
            group, member = found
            if group.plan.phase == "train" and len(group.published) == 1:
                begun.append((group.plan.group_id, self.feed.begun_step(group.plan.group_id)))
            lease = self._lease(one.episode_id, one.server_id)
            started.append(PublishEpisode(group.episode(member, lease, one.room_wait_s)))
        return [*([BeginGroups(tuple(begun))] if begun else []), *started]

    def _lease(self, episode_id: str, server_id: str) -> Lease:
        status = self.health.statuses[server_id]
        return Lease(
            episode_id=episode_id,
            server_id=server_id,
            nats_subject=status.nats_subject,
            zmq_endpoint=status.zmq_endpoint,
            zmq_public_key=status.zmq_public_key,
            incarnation=status.incarnation,
            ask_after_s=self._config.ask_after_s,
        )
