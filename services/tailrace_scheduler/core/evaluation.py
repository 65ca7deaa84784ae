"""Evaluations: the steps that have one, the time when each may start, and its result.

The first one (weights of the run's first step, before any training) and the last one (weights of
`max_steps`, after all training) play the whole fixed set; those in between, every `eval_steps`, play a
prefix of it while training goes on. An evaluation starts when every healthy server serves weights at
least as new as its step's. A learner that resumes at step s takes back the evaluations of later steps.
"""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from tailrace.config import RunConfig
from tailrace_protos.episode import EnvTask
from tailrace_protos.event import (
    EpisodeSettled,
    EvaluationFinished,
    EvaluationStarted,
    GroupClosed,
    TagEvaluation,
)
from tailrace_scheduler.config import SchedulerConfig
from tailrace_scheduler.core.admission import ServerView
from tailrace_scheduler.core.decisions import Emit
from tailrace_scheduler.core.tasks import TaskSource
from tailrace_scheduler.ports import GroupPlan


@dataclass
class EvaluationTally:
    """Sums over episodes."""

    num_valid: int = 0
    reward_sum: float = 0.0
    num_successes: float = 0.0

    def count(self, event: EpisodeSettled) -> None:
        """Add an episode."""
        if event.outcome.is_valid:
            self.num_valid += 1
            self.reward_sum += event.reward
            self.num_successes += event.success or 0.0

    def means(self) -> TagEvaluation:
        """Means over the valid episodes."""
        num_valid = max(self.num_valid, 1)
        return TagEvaluation(
            self.num_successes / num_valid, self.reward_sum / num_valid, self.num_valid
        )


@dataclass
class TaggedTally:
    """Sums over episodes, of all and of each tag."""

    all_tags: EvaluationTally = field(default_factory=EvaluationTally)
    tags: defaultdict[str, EvaluationTally] = field(
        default_factory=lambda: defaultdict(EvaluationTally)
    )

    def count(self, event: EpisodeSettled, tag: str) -> None:
        """Add an episode of a task of `tag`."""
        self.all_tags.count(event)
        self.tags[tag].count(event)

    def tag_means(self) -> dict[str, TagEvaluation]:
        """Means of each tag, by name."""
        return {tag: tally.means() for tag, tally in sorted(self.tags.items())}


@dataclass
class Evaluation:
    """One evaluation under way."""

    event: EvaluationStarted
    num_groups: int
    closed: set[str] = field(default_factory=set)
    settled: set[str] = field(default_factory=set)
    sampled: TaggedTally = field(default_factory=TaggedTally)
    greedy: TaggedTally = field(default_factory=TaggedTally)

    def settle(self, event: EpisodeSettled, task: EnvTask) -> None:
        """Count an episode of a task, once."""
        if event.episode_id in self.settled:
            return
        self.settled.add(event.episode_id)
        tally = self.greedy if task.greedy else self.sampled
        tally.count(event, task.env_name)

    def result(self) -> EvaluationFinished:
        """Means over the valid episodes, of all and of each tag."""
        means = self.sampled.all_tags.means()
        return EvaluationFinished(
            evaluation_id=self.event.evaluation_id,
            step=self.event.step,
            success_rate=means.success_rate,
            reward_mean=means.reward_mean,
            num_valid=means.num_valid,
            num_episodes=self.event.num_episodes,
            tags=self.sampled.tag_means(),
            greedy=self.greedy.all_tags.means() if self.greedy.tags else None,
            greedy_tags=self.greedy.tag_means(),
        )


def evaluation_of(group_id: str) -> str:
    """Id of the evaluation that an evaluation group belongs to."""
    return group_id.rpartition(".")[0]


class EvaluationPlan:
    """All evaluations of a run: done, under way and to come."""

    def __init__(self, run: RunConfig, config: SchedulerConfig, tasks: TaskSource) -> None:
        self._run = run
        self._config = config
        self._tasks = tasks
        self._first_step: int | None = None
        self._running: dict[str, Evaluation] = {}
        self._started: dict[int, str] = {}  # step -> evaluation id
        self._pending: set[int] = set()  # steps reached and not started
        self._finished: set[int] = set()  # steps
        self._reported: set[str] = set()  # evaluation ids whose result was decided

    @property
    def running(self) -> bool:
        """Tell whether an evaluation is under way."""
        return bool(self._running)

    @property
    def settled_all(self) -> bool:
        """Tell whether every evaluation that is due has its result."""
        return not self._running and not self._pending

    def is_due(self, step: int) -> bool:
        """Tell whether the weights of `step` are evaluated."""
        if self._first_step is None or step < self._first_step:
            return False
        every = self._run.eval_steps
        return self._is_end(step) or (every > 0 and step % every == 0)

    def is_finished(self, step: int) -> bool:
        """Tell whether the evaluation of `step` has a result."""
        return step in self._finished

    @property
    def first_done(self) -> bool:
        """Tell whether training may begin."""
        return self._first_step is not None and self._first_step in self._finished

    def resumed(self, step: int) -> frozenset[str]:
        """A learner starts at `step`; returns the evaluations under way that are taken back."""
        if self._first_step is None or step < self._first_step:
            self._first_step = step
        self._finished = {done for done in self._finished if done <= step}
        self._pending = {due for due in self._pending if due <= step}
        late = {started: name for started, name in self._started.items() if started > step}
        for started, name in late.items():
            del self._started[started]
            self._running.pop(name, None)
        self.reached(step)
        return frozenset(late.values())

    def reached(self, step: int) -> None:
        """Weights of `step` exist."""
        if self.is_due(step) and step not in self._started:
            self._pending.add(step)

    def next_start(
        self, version_of: Callable[[int], int], servers: ServerView, num_train_running: int
    ) -> EvaluationStarted | None:
        """The earliest evaluation not started yet, if it may start now.

        `version_of` gives the policy version of a step's weights, -1 while it is not published.
        """
        if not self._pending:
            return None
        step = min(self._pending)
        needed = version_of(step)
        if servers.num_healthy == 0 or needed < 0 or servers.min_policy_version < needed:
            return None
        is_last = step >= self._run.max_steps and step != self._first_step
        if is_last and (num_train_running or self._running):
            return None
        version = servers.min_policy_version
        return EvaluationStarted(
            evaluation_id=f"e{step}-v{version}",
            step=step,
            policy_version=version,
            num_episodes=self._num_tasks(step) * self._config.eval_episodes_per_task,
        )

    def started(self, event: EvaluationStarted) -> None:
        """Take note of a start, decided now or read from the log after a restart."""
        if self._started.get(event.step) == event.evaluation_id:
            return
        self._started[event.step] = event.evaluation_id
        self._pending.discard(event.step)
        num_tasks = event.num_episodes // self._config.eval_episodes_per_task
        self._running[event.evaluation_id] = Evaluation(event, num_tasks * self._groups_per_task)

    def groups_of(self, event: EvaluationStarted, deadline_unix_s: float) -> list[GroupPlan]:
        """The groups of an evaluation: a prefix of the fixed set, named so that they come only once.

        With `eval_greedy`, the group after each sampled one plays the same task greedily.
        """
        num_tasks = event.num_episodes // self._config.eval_episodes_per_task
        return [
            GroupPlan(
                group_id=f"{event.evaluation_id}.{index:05d}",
                group_index=index,
                phase="eval",
                tasks=(task,) * (1 if task.greedy else self._config.eval_group_size),
                deadline_unix_s=deadline_unix_s,
                min_valid=1,
                step=event.step,
            )
            for index in range(num_tasks * self._groups_per_task)
            for task in [self._task(index)]
        ]

    def unclosed(self) -> list[tuple[EvaluationStarted, frozenset[str]]]:
        """Evaluations under way and their groups that have closed; for a restart."""
        return [(one.event, frozenset(one.closed)) for one in self._running.values()]

    def settle(self, event: EpisodeSettled) -> None:
        """An evaluation episode ended."""
        evaluation = self._running.get(evaluation_of(event.group_id))
        if evaluation is not None:
            evaluation.settle(event, self._task(int(event.group_id.rpartition(".")[2])))

    def close(self, event: GroupClosed) -> None:
        """An evaluation group closed."""
        evaluation = self._running.get(evaluation_of(event.group_id))
        if evaluation is not None:
            evaluation.closed.add(event.group_id)

    def results(self) -> list[Emit]:
        """Results of evaluations whose last group has closed, each decided once."""
        done = [one for one in self._running.values() if len(one.closed) >= one.num_groups]
        fresh = [one for one in done if one.event.evaluation_id not in self._reported]
        self._reported.update(one.event.evaluation_id for one in fresh)
        return [Emit(f"finished/{one.event.evaluation_id}", one.result()) for one in fresh]

    def finished(self, event: EvaluationFinished) -> None:
        """Take note that the run's log holds a result."""
        self._running.pop(event.evaluation_id, None)
        if self._started.get(event.step) == event.evaluation_id:
            self._finished.add(event.step)

    @property
    def _groups_per_task(self) -> int:
        return 1 + self._config.eval_greedy

    def _task(self, group_index: int) -> EnvTask:
        """Task of a group; the second group of each task is greedy."""
        index, is_greedy = divmod(group_index, self._groups_per_task)
        return msgspec.structs.replace(self._tasks.eval_task(index), greedy=bool(is_greedy))

    def _num_tasks(self, step: int) -> int:
        return self._config.eval_groups if self._is_end(step) else self._config.interim_groups

    def _is_end(self, step: int) -> bool:
        return step == self._first_step or step >= self._run.max_steps
