"""Activity of episodes as agents workers report it, summed over workers that are not silent."""

from typing import NamedTuple

from tailrace_protos.control import AgentActivity


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
