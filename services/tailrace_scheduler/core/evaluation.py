"""Evaluations: the steps that have one, the time when each may start, and its result.

The first one (weights of the run's first step, before any training) and the last one (weights of
`max_steps`, after all training) play the whole fixed set; those in between, every `eval_steps`, play a
prefix of it while training goes on, or waits for it (`pin_evaluations`). An evaluation starts when
every healthy server serves weights at least as new as its step's. A learner that resumes at step s
takes back the evaluations of later steps; a restart takes back those under way that other settings
planned. Training that ends early (`end_at`) has its last evaluation there, beside an evaluation of the
same weights with fewer tasks.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

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
from tailrace_scheduler.core.decisions import Emit
from tailrace_scheduler.core.health import ServingState
from tailrace_scheduler.core.tasks import TaskSource
from tailrace_scheduler.ports import GroupPlan


@dataclass
class EvaluationTally:
    """Sums over episodes."""

    num_valid: int = 0
    reward_sum: float = 0.0
    num_successes: float = 0.0
    samples: defaultdict[str, list[float]] = field(default_factory=lambda: defaultdict(list))

    def count(self, event: EpisodeSettled) -> None:
        """Add an episode."""
        if event.outcome.is_valid:
            self.num_valid += 1
            self.reward_sum += event.reward
            success = event.success or 0.0
            self.num_successes += success
            self.samples[event.group_id].append(success)

    def means(self) -> TagEvaluation:
        """Means over the valid episodes."""
        num_valid = max(self.num_valid, 1)
        success_rate, reward_mean = self.num_successes / num_valid, self.reward_sum / num_valid
        return TagEvaluation(success_rate, reward_mean, self.num_valid, self._pass_at())

    def _pass_at(self) -> dict[int, float]:
        """For k = 2, 4, ... and the number of samples: mean over the tasks that have k samples."""
        most = max(map(len, self.samples.values()), default=0)
        found = {}
        for k in sorted({*(1 << bit for bit in range(1, most.bit_length())), most} - {0, 1}):
            tasks = [one for one in self.samples.values() if len(one) >= k]
            found[k] = sum(_pass_rate(one, k) for one in tasks) / len(tasks)
        return found


def _pass_rate(successes: Sequence[float], k: int) -> float:
    """Probability that k of the samples, drawn without replacement, hold a success."""
    num_failed = sum(one < 1.0 for one in successes)
    return 1.0 - math.comb(num_failed, k) / math.comb(len(successes), k)


class EvalGroup(NamedTuple):
    """One task of an evaluation. `name`: its tag, or the named evaluation."""

    name: str
    task: EnvTask
    num_samples: int


@dataclass
class TaggedTally:
    """Sums over episodes: those of the run's means, and those of each tag or named evaluation."""

    all_tags: EvaluationTally = field(default_factory=EvaluationTally)
    tags: defaultdict[str, EvaluationTally] = field(
        default_factory=lambda: defaultdict(EvaluationTally)
    )

    def tag_means(self) -> dict[str, TagEvaluation]:
        """Means of each tag, by name."""
        return {tag: tally.means() for tag, tally in sorted(self.tags.items())}


@dataclass
class Evaluation:
    """One evaluation under way."""

    event: EvaluationStarted
    groups: list[EvalGroup]
    headline: str  # named evaluation whose means are the run's; empty: those of all tags
    closed: set[str] = field(default_factory=set)
    settled: set[str] = field(default_factory=set)
    sampled: TaggedTally = field(default_factory=TaggedTally)
    greedy: TaggedTally = field(default_factory=TaggedTally)

    def settle(self, event: EpisodeSettled) -> None:
        """Count an episode, once; one that other settings planned is left out."""
        place = int(event.group_id.rpartition(".")[2])
        if event.episode_id in self.settled or place >= len(self.groups):
            return
        self.settled.add(event.episode_id)
        group = self.groups[place]
        tally = self.greedy if group.task.greedy else self.sampled
        tally.tags[group.name].count(event)
        if group.name == self.headline or not self.headline:
            tally.all_tags.count(event)

    def has_planned(self, plan: GroupPlan) -> bool:
        """Tell whether the group is one of this evaluation as it is set now."""
        place = int(plan.group_id.rpartition(".")[2])
        planned = self.groups[place] if place < len(self.groups) else None
        return planned is not None and plan.tasks == (planned.task,) * planned.num_samples

    def result(self) -> EvaluationFinished:
        """Means over the valid episodes, of the run and of each tag or named evaluation."""
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


def _num_episodes(groups: Sequence[EvalGroup]) -> int:
    return sum(one.num_samples for one in groups)


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
        self._last_step = run.max_steps
        self._running: dict[str, Evaluation] = {}
        self._started: dict[int, str] = {}  # step -> evaluation id
        self._pending: set[int] = set()  # steps reached and not started
        self._finished: set[int] = set()  # steps
        self._interim: set[int] = set()  # steps whose evaluation is between the first and the last
        self._replaced = ""  # id of an evaluation that is repeated with all tasks
        self._reported: set[str] = set()  # evaluation ids whose result was decided
        self._taken_back: set[str] = set()  # ids of evaluations that another one has replaced

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
        self._last_step = self._run.max_steps
        late = {started: name for started, name in self._started.items() if started > step}
        for started, name in late.items():
            del self._started[started]
            self._running.pop(name, None)
        self.reached(step)
        return frozenset(late.values())

    def begin_again(self, open_groups: Collection[GroupPlan]) -> frozenset[str]:
        """Return the evaluations under way that are taken back after a restart: their tasks or samples
        are not those of the settings now, and another evaluation of the same step follows."""
        plans: defaultdict[str, list[GroupPlan]] = defaultdict(list)
        for plan in open_groups:
            plans[evaluation_of(plan.group_id)].append(plan)
        changed = [
            one
            for name, one in self._running.items()
            if one.event.num_episodes != _num_episodes(self._planned(one.event.is_interim))
            or not all(map(one.has_planned, plans[name]))
        ]
        for one in changed:
            name, step = one.event.evaluation_id, one.event.step
            del self._running[name]
            if self._started.get(step) == name:
                del self._started[step]
                self._interim.discard(step)
                self.reached(step)
        names = frozenset(one.event.evaluation_id for one in changed)
        self._taken_back |= names
        return names

    def reached(self, step: int) -> None:
        """Weights of `step` exist."""
        if self.is_due(step) and step not in self._started:
            self._pending.add(step)

    def end_at(self, step: int) -> None:
        """No weights follow those of `step`: they are the last ones to be evaluated, in full."""
        self._last_step = min(step, self._run.max_steps)
        if step in self._interim and len(self._planned(True)) < len(self._planned(False)):
            self._replaced = self._started.pop(step)
            self._interim.discard(step)
            self._finished.discard(step)
        self.reached(step)

    def next_start(
        self, version_of: Callable[[int], int], servers: ServingState, num_train_running: int
    ) -> EvaluationStarted | None:
        """The earliest evaluation not started yet, if it may start now.

        `version_of` gives the policy version of a step's weights, -1 while it is not published.
        """
        if not self._pending:
            return None
        step, version = min(self._pending), servers.min_policy_version
        is_served = servers.num_healthy > 0 and 0 <= version_of(step) <= version
        is_last = step >= self._last_step and step != self._first_step
        if not is_served or (is_last and (num_train_running or self._running)):
            return None
        is_interim = not self._is_end(step)
        name = f"e{step}-v{version}"
        name = f"{name}-full" if name == self._replaced else name
        while name in self._taken_back:
            name = f"{name}-again"
        return EvaluationStarted(
            evaluation_id=name,
            step=step,
            policy_version=version,
            num_episodes=_num_episodes(self._planned(is_interim)),
            is_interim=is_interim,
        )

    def barrier(self, step: int) -> int:
        """The step that training must not pass before its evaluation has a result.

        With pinned evaluations no weights come into being while one is under way.
        """
        every = self._run.eval_steps
        if not every or not self._config.pins_evaluations(self._run):
            return self._run.max_steps
        due = -(-step // every) * every
        return due + every if self.is_finished(due) or not self.is_due(due) else due

    def started(self, event: EvaluationStarted) -> None:
        """Take note of a start, decided now or read from the log after a restart."""
        before = self._started.get(event.step, "")
        if before == event.evaluation_id:
            return
        if before:  # it was taken back, perhaps before a restart
            self._running.pop(before, None)
            self._taken_back.add(before)
        self._started[event.step] = event.evaluation_id
        self._pending.discard(event.step)
        if event.is_interim:
            self._interim.add(event.step)
        headline = next(iter(self._run.evaluations), "")
        self._running[event.evaluation_id] = Evaluation(event, self._groups_of(event), headline)

    def groups_of(self, event: EvaluationStarted, now_s: float) -> list[GroupPlan]:
        """The groups of an evaluation: a prefix of the fixed set, named so that they come only once.

        With `eval_greedy`, the group after each sampled one plays the same task greedily.
        """
        timeout_s = self._config.group_timeout_s
        return [
            GroupPlan(
                group_id=f"{event.evaluation_id}.{index:05d}",
                group_index=index,
                phase="eval",
                tasks=(group.task,) * group.num_samples,
                deadline_unix_s=now_s + timeout_s,
                timeout_s=timeout_s,
                min_valid=1,
                step=event.step,
            )
            for index, group in enumerate(self._groups_of(event))
        ]

    def unclosed(self) -> list[tuple[EvaluationStarted, frozenset[str]]]:
        """Evaluations under way and their groups that have closed; for a restart."""
        return [(one.event, frozenset(one.closed)) for one in self._running.values()]

    def settle(self, event: EpisodeSettled) -> None:
        """An evaluation episode ended."""
        evaluation = self._running.get(evaluation_of(event.group_id))
        if evaluation is not None:
            evaluation.settle(event)

    def close(self, event: GroupClosed) -> None:
        """An evaluation group closed."""
        evaluation = self._running.get(evaluation_of(event.group_id))
        if evaluation is not None:
            evaluation.closed.add(event.group_id)

    def results(self) -> list[Emit]:
        """Results of evaluations whose last group has closed, each decided once."""
        done = [one for one in self._running.values() if len(one.closed) >= len(one.groups)]
        fresh = [one for one in done if one.event.evaluation_id not in self._reported]
        self._reported.update(one.event.evaluation_id for one in fresh)
        return [Emit(f"finished/{one.event.evaluation_id}", one.result()) for one in fresh]

    def finished(self, event: EvaluationFinished) -> None:
        """Take note that the run's log holds a result."""
        self._running.pop(event.evaluation_id, None)
        if self._started.get(event.step) == event.evaluation_id:
            self._finished.add(event.step)

    def _groups_of(self, event: EvaluationStarted) -> list[EvalGroup]:
        if self._run.evaluations:
            return self._planned(event.is_interim)
        return self._of_tags(event.num_episodes // self._config.eval_episodes_per_task)

    def _planned(self, is_interim: bool) -> list[EvalGroup]:
        config = self._config
        if not self._run.evaluations:
            return self._of_tags(config.interim_groups if is_interim else config.eval_groups)
        groups = []
        for name, args in self._run.evaluations.items():
            num_tasks = args.num_tasks or config.eval_groups
            if is_interim and config.eval_interim_groups:
                num_tasks = min(num_tasks, config.eval_interim_groups)
            tasks = (self._tasks.named_eval_task(name, args.tag or name, n) for n in range(num_tasks))
            groups += [EvalGroup(name, task, args.num_samples) for task in tasks]
        return self._with_greedy(groups)

    def _of_tags(self, num_tasks: int) -> list[EvalGroup]:
        tasks = map(self._tasks.eval_task, range(num_tasks))
        size = self._config.eval_group_size
        return self._with_greedy([EvalGroup(task.env_name, task, size) for task in tasks])

    def _with_greedy(self, groups: Sequence[EvalGroup]) -> list[EvalGroup]:
        """The groups, with `eval_greedy` each before one that plays its task greedily."""
        if not self._config.eval_greedy:
            return list(groups)
        greedy = [
            EvalGroup(one.name, msgspec.structs.replace(one.task, greedy=True), 1) for one in groups
        ]
        return [group for pair in zip(groups, greedy, strict=True) for group in pair]

    def _is_end(self, step: int) -> bool:
        return step == self._first_step or step >= self._last_step
