"""Data order: the n-th task, fixed by the run's seed alone, and the groups that play it.

Task n is a pure function of (seed, n): it depends neither on what was admitted before nor on the
order in which episodes finish, so a resumed run continues with exactly the tasks it would have had.
The training tasks of a tag have consecutive seeds. An environment of N tasks, which selects one by its
seed modulo N, so plays each of them once before one comes again.
"""

import hashlib
from collections.abc import Sequence

from tailrace.config import RunConfig
from tailrace_protos.episode import EnvTask
from tailrace_protos.event import LearnerResumed
from tailrace_scheduler.config import SchedulerConfig
from tailrace_scheduler.ports import GroupPlan

_FIRST_SEED_BITS = 30  # gymnasium and numpy take seeds of 31: a billion tasks may follow


class TaskSource:
    """The training tasks and the fixed evaluation set of one run."""

    def __init__(
        self,
        seed: int,
        tags: Sequence[str],
        partition: Sequence[int] = (),
        eval_tags: Sequence[str] = (),
        eval_partition: Sequence[int] = (),
    ) -> None:
        assert tags
        self._seed = seed
        self._cycle = _cycle(tags, partition)
        self._eval_cycle = _cycle(eval_tags or tags, eval_partition)

    def train_task(self, index: int) -> EnvTask:
        """The task of training group `index`; every cycle holds each tag as often as its share."""
        assert index >= 0
        cycle, position = divmod(index, len(self._cycle))
        slots = sorted(range(len(self._cycle)), key=lambda slot: self._draw("order", cycle, slot))
        tags = [self._cycle[slot] for slot in slots]
        tag, ordinal = tags[position], _ordinal(tags, index)
        first = self._draw(f"first of {tag}") >> (64 - _FIRST_SEED_BITS)
        return EnvTask(tag, first + ordinal, ordinal)

    def eval_task(self, index: int) -> EnvTask:
        """Task `index` of the evaluation set: its seed is `index`, whatever the run's seed is."""
        tag = self._eval_cycle[index % len(self._eval_cycle)]
        return EnvTask(tag, index, _ordinal(self._eval_cycle, index))

    def named_eval_task(self, name: str, tag: str, index: int) -> EnvTask:
        """Task `index` of a named evaluation of `tag`."""
        return EnvTask(tag, index, index, evaluation=name)

    def _draw(self, purpose: str, *numbers: int) -> int:
        """64 pseudo-random bits, the same on every machine and Python."""
        text = ":".join([purpose, str(self._seed), *map(str, numbers)])
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")


class TrainGroups:
    """Train groups in the order of their admission: each index gets its task once."""

    def __init__(self, run: RunConfig, config: SchedulerConfig, tasks: TaskSource) -> None:
        self._run = run
        self._config = config
        self._tasks = tasks
        self.next_index = 0
        self.highest_index = -1  # ever admitted, also in a Redis that is gone

    def admitted(self, index: int) -> None:
        """Take note of a group in the log."""
        self.highest_index = max(self.highest_index, index)

    def resumed(self, body: LearnerResumed) -> None:
        """The learner went on; its groups are not given again."""
        self.next_index = max(self.next_index, body.next_group_index)

    def next(self, lineage: str, step: int, now_s: float) -> GroupPlan:
        """Return the next group; its id names the lineage where an earlier group had the index."""
        index = self.next_index
        self.next_index += 1
        again = f"-{lineage[:16]}" if index <= self.highest_index else ""
        timeout_s, size = self._config.group_timeout_s, self._run.group_size
        return GroupPlan(
            group_id=f"t{index:08d}{again}",
            group_index=index,
            phase="train",
            tasks=(self._tasks.train_task(index),) * size,
            deadline_unix_s=now_s + timeout_s,
            timeout_s=timeout_s,
            min_valid=self._config.needed_valid(size),
            step=step,
        )


def _cycle(tags: Sequence[str], partition: Sequence[int]) -> list[str]:
    """Every tag as often as its share, once where there are no shares."""
    shares = partition or [1] * len(tags)
    return [tag for tag, share in zip(tags, shares, strict=True) for _ in range(share)]


def _ordinal(tags: Sequence[str], index: int) -> int:
    """Number of tasks before `index` that have its tag.

    Every cycle has the same tags, this one in the order of `tags`.
    """
    cycle, position = divmod(index, len(tags))
    tag = tags[position]
    return cycle * tags.count(tag) + tags[:position].count(tag)
