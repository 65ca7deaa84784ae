"""Idle causes of the learner and the engines: each of their seconds has exactly one account.

The accounts of an interval (a row of `metrics.jsonl`) are six causes and two kinds of work, `learner`
and `engine`. They sum to the interval's wall time, as seconds of the average resource: the learner and
each of the n engines count 1/(1 + n).

*Engines* report their idle and busy seconds with every heartbeat; what was idle gets the cause that
`engine_cause` sees then. Heartbeats and intervals do not coincide: what an interval lacks is filled
with the latest mixture and taken off the next heartbeats; what it leaves goes to the next interval, the
oldest seconds first, but no more than a heartbeat's: older ones lie before the interval. The *learner*
reports its busy seconds with each step; the rest of the interval is idle and is split like the moments
in which `learner_cause` saw it wait.

The cause at a moment, by the first rule that holds:

| engine | learner | cause |
|---|---|---|
| it, or admission, waits for a policy version | admission waits for a version | weights |
| no episode is open, and admission is withheld | the same | credit |
| episodes are open, none generates, most of them are in tools | most are in tools | tool |
| ... in reward | in reward | reward |
| others are still generating, and admission is withheld | most generate | straggler |
| anything else: queued, on the wire, settling | the same | transport |
"""

from collections import Counter, deque
from collections.abc import Mapping
from typing import Literal, NamedTuple, get_args

from tailrace_protos.control import AgentActivity, ServerState, ServerStatus
from tailrace_protos.subjects import PHASES, Phase
from tailrace_scheduler.core.streams.credit import WEIGHTS

Cause = Literal["credit", "straggler", "tool", "reward", "weights", "transport"]
Account = Literal["credit", "straggler", "tool", "reward", "weights", "transport", "learner", "engine"]

CAUSES: tuple[Cause, ...] = get_args(Cause)
ACCOUNTS: tuple[Account, ...] = get_args(Account)

Accounts = dict[Account, float]  # seconds
_MAX_BEATS = 4096  # kept apart; hours may pass between two rows, with thousands of heartbeats a second


class ActivityCounts(NamedTuple):
    """Episodes of all workers by what they wait for."""

    num_generating: int = 0
    num_in_tools: int = 0
    num_in_reward: int = 0
    num_settling: int = 0

    @property
    def total(self) -> int:
        """Episodes that some worker plays now."""
        return sum(self)


class Activities:
    """The newest activity of each worker."""

    def __init__(self, ttl_s: float) -> None:
        self._ttl_s = ttl_s
        self._newest: dict[str, tuple[float, AgentActivity]] = {}
        self._has_workers = False

    def heard(self, activity: AgentActivity, now_s: float) -> None:
        """A worker said what its episodes do."""
        self._newest[activity.worker_id] = (now_s, activity)

    def counts(self, now_s: float) -> ActivityCounts:
        """Sums over workers heard within the time to live."""
        ours = self._heard(now_s)
        return ActivityCounts(
            sum(one.num_generating for one in ours),
            sum(one.num_in_tools for one in ours),
            sum(one.num_in_reward for one in ours),
            sum(one.num_settling for one in ours),
        )

    def max_episodes(self, now_s: float) -> dict[Phase, int]:
        """Episodes of each phase that all workers play at once; empty: no worker has said."""
        most: Counter[Phase] = Counter()
        for one in self._heard(now_s):
            most.update(one.max_episodes)
        self._has_workers |= bool(most)
        return {phase: most[phase] for phase in PHASES} if self._has_workers else {}

    def num_waiting(self, now_s: float) -> int:
        """Groups with an episode that no agent outside of the cluster has leased yet."""
        return len({group for one in self._heard(now_s) for group in one.waiting_groups})

    def _heard(self, now_s: float) -> list[AgentActivity]:
        """The newest activities; silent workers are forgotten."""
        self._newest = {
            worker: (heard_s, activity)
            for worker, (heard_s, activity) in self._newest.items()
            if now_s - heard_s <= self._ttl_s
        }
        return [activity for _, activity in self._newest.values()]


class Situation(NamedTuple):
    """One moment, as far as idleness is concerned."""

    blocked_by: str  # why admission is withheld; empty: it is not
    num_open_episodes: int
    activity: ActivityCounts
    newest_policy_version: int
    learner_has_work: bool  # groups enough for its step wait for it


def engine_cause(now: Situation, status: ServerStatus) -> Cause:
    """Cause for which this engine has nothing to compute."""
    behind = status.policy_version < now.newest_policy_version
    if status.state is ServerState.STARTING or (now.blocked_by == WEIGHTS and behind):
        return "weights"
    if now.num_open_episodes == 0:
        return _nothing_open(now)
    activity = now.activity
    if activity.num_generating == 0:
        return _largest(activity)
    return "straggler" if now.blocked_by else _largest(activity._replace(num_generating=0))


def learner_cause(now: Situation) -> Cause:
    """Cause for which the learner has no groups."""
    if now.blocked_by == WEIGHTS:
        return "weights"
    if now.num_open_episodes == 0:
        return _nothing_open(now)
    return _largest(now.activity)


def _nothing_open(now: Situation) -> Cause:
    if now.blocked_by == WEIGHTS:
        return "weights"
    return "credit" if now.blocked_by else "transport"


def _largest(activity: ActivityCounts) -> Cause:
    """Stage that most episodes at workers wait for."""
    counts: dict[Cause, int] = {
        "straggler": activity.num_generating,
        "tool": activity.num_in_tools,
        "reward": activity.num_in_reward,
        "transport": activity.num_settling,
    }
    cause = max(counts, key=counts.__getitem__)
    return cause if counts[cause] else "transport"


class IdleLedger:
    """The accounts of the interval that is open now."""

    def __init__(self, now_s: float) -> None:
        self._ticked_s = now_s
        self._learner: Accounts = {}  # seconds seen waiting, by cause
        self._engines: deque[Accounts] = (
            deque()
        )  # seconds not given out yet, by heartbeat, oldest first
        self._beat_s = 0.0  # length of the latest heartbeat
        self._mixture: Accounts = {"transport": 1.0}  # of the latest heartbeat; sums to 1
        self._debt_s = 0.0  # engine seconds given out before they were reported
        self._learner_cause: Cause = "transport"

    def tick(self, now: Situation, now_s: float) -> None:
        """Time passed in this situation since the last tick."""
        self._learner_cause = learner_cause(now)
        if not now.learner_has_work:
            _add(self._learner, {self._learner_cause: max(now_s - self._ticked_s, 0.0)})
        self._ticked_s = now_s

    def heartbeat(self, now: Situation, before: ServerStatus, status: ServerStatus) -> None:
        """A server's counters moved from `before` to `status`; one that restarted counts from 0."""
        restarted = status.idle_s < before.idle_s or status.busy_s < before.busy_s
        idle_s = status.idle_s - (0.0 if restarted else before.idle_s)
        busy_s = status.busy_s - (0.0 if restarted else before.busy_s)
        total_s = idle_s + busy_s
        if total_s <= 0.0:
            return
        self._mixture = {engine_cause(now, status): idle_s / total_s, "engine": busy_s / total_s}
        paid_s = min(self._debt_s, total_s)
        self._debt_s -= paid_s
        self._beat_s = total_s
        if total_s > paid_s:
            self._engines.append(_scaled(self._mixture, total_s - paid_s))
        if len(self._engines) > _MAX_BEATS:
            oldest = self._engines.popleft()
            _add(self._engines[0], oldest)

    def cut(self, wall_s: float, learner_busy_s: float, num_engines: int) -> Accounts:
        """Close an interval of `wall_s`: seconds of each account, which sum to it."""
        total: Accounts = dict.fromkeys(ACCOUNTS, 0.0)
        _add(total, self._cut_learner(wall_s, min(max(learner_busy_s, 0.0), wall_s)))
        _add(total, self._cut_engines(num_engines, wall_s))
        return {account: seconds / (1 + num_engines) for account, seconds in total.items()}

    def _cut_learner(self, wall_s: float, busy_s: float) -> Accounts:
        seen, self._learner = self._learner, {}
        seen_s = sum(seen.values())
        if seen_s <= 0.0:
            seen, seen_s = {self._learner_cause: 1.0}, 1.0
        learner: Accounts = {"learner": busy_s}
        shares = {cause: seconds / seen_s for cause, seconds in seen.items()}  # also of next to nothing
        _add(learner, shares, wall_s - busy_s)
        return learner

    def _cut_engines(self, num_engines: int, wall_s: float) -> Accounts:
        wanted_s = wall_s * num_engines
        given = self._take(wanted_s)
        lacking_s = wanted_s - sum(given.values())
        if lacking_s > 0.0 and not self._engines:
            self._debt_s += lacking_s
            _add(given, self._mixture, lacking_s)
        self._take(sum(map(_seconds, self._engines)) - self._beat_s * max(num_engines, 1))
        return given

    def _take(self, wanted_s: float) -> Accounts:
        """Remove the oldest engine seconds: at most `wanted_s`, fewer if fewer are there."""
        taken: Accounts = {}
        while self._engines and wanted_s > 0.0:
            oldest = self._engines.popleft()
            held_s = _seconds(oldest)
            if wanted_s < held_s:
                share = wanted_s / held_s
                _add(taken, oldest, share)
                self._engines.appendleft(_scaled(oldest, 1.0 - share))
                break  # what rounding leaves of `wanted_s` would be taken for ever
            _add(taken, oldest)
            wanted_s -= held_s
        return taken


def _seconds(accounts: Accounts) -> float:
    return sum(accounts.values())


def _scaled(accounts: Accounts, factor: float) -> Accounts:
    return {account: seconds * factor for account, seconds in accounts.items()}


def _add(accounts: Accounts, more: Mapping[Account, float], factor: float = 1.0) -> None:
    for account, seconds in more.items():
        accounts[account] = accounts.get(account, 0.0) + seconds * factor
