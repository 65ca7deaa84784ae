"""The rows of `metrics.jsonl`, as a fold over the run's events.

The first row is the evaluation of the first step, before reinforcement learning; then comes one row
per learner step, in order. The row of a step that is evaluated waits for that evaluation, and the rows
after it wait behind it. A learner that resumes at step s takes back all rows beyond s. Where training
ends early, the last row is written again, with `task_solved` and its evaluation. Every row has
every key of `METRIC_KEYS`, null where the value is unknown. Further metrics of the learner (critic,
corrections) and evaluations of single tags follow them.
"""

from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple, overload

import msgspec

from tailrace_protos.episode import Outcome
from tailrace_protos.event import (
    EpisodeSettled,
    EvaluationFinished,
    EvaluationStarted,
    Event,
    LearnerResumed,
    ModelPrepared,
    StepFinished,
    TagEvaluation,
    TrainingEnded,
)
from tailrace_scheduler.core.idle import CAUSES
from tailrace_scheduler.ports import Row

LEARNER_KEYS = (
    "reward_mean",
    "reward_std",
    "success_rate",
    "loss",
    "grad_norm",
    "entropy",
    "kl",
    "mismatch_kl",
    "mismatch_correlation",
    "behaviour_kl",
    "staleness_mean",
    "staleness_max",
    "num_groups",
    "num_trained_tokens",
    "tokens_per_s",
)
IDLE_KEYS = (*(f"idle/{cause}" for cause in CAUSES), "busy/learner", "busy/engine")
OUTCOME_KEYS = tuple(f"outcome/{outcome.value}" for outcome in Outcome)
METRIC_KEYS = (
    "step",
    "time_s",
    "policy_version",
    "eval/success_rate",
    "eval/reward_mean",
    "eval/greedy/success_rate",
    "eval/greedy/reward_mean",
    *LEARNER_KEYS,
    *IDLE_KEYS,
    *OUTCOME_KEYS,
)

# Wall seconds of an interval and the learner's busy seconds in it -> seconds per key of IDLE_KEYS, or
# nothing where the interval was not watched (rows made up for after a restart).
CutIdle = Callable[[float, float], Mapping[str, float]]

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(list[int | float | None])


class Rewind(NamedTuple):
    """Rows of steps beyond this one have not happened."""

    step: int


Change = Row | Rewind


class Rows(Sequence[Row]):
    """Rows in the order of their steps, without their names: a long run has 100,000 of them."""

    def __init__(self, changes: Iterable[Change] = ()) -> None:
        self._names: dict[tuple[str, ...], tuple[str, ...]] = {}  # each once
        self._packed: list[tuple[tuple[str, ...], bytes]] = []
        self._steps: list[int] = []
        self.extend(changes)

    @overload
    def __getitem__(self, index: int) -> Row: ...

    @overload
    def __getitem__(self, index: slice) -> list[Row]: ...

    def __getitem__(self, index: int | slice) -> Row | list[Row]:
        if isinstance(index, slice):
            return [_unpacked(one) for one in self._packed[index]]
        return _unpacked(self._packed[index])

    def __len__(self) -> int:
        return len(self._packed)

    def append(self, row: Row) -> None:
        """Add the row of the next step."""
        names = tuple(row)
        self._packed.append((self._names.setdefault(names, names), _encoder.encode([*row.values()])))
        self._steps.append(_step_of(row))

    def extend(self, changes: Iterable[Change]) -> None:
        """Apply changes in their order."""
        for change in changes:
            if isinstance(change, Rewind):
                self.rewind(change.step)
            else:
                self.append(change)

    def rewind(self, step: int) -> None:
        """Take back the rows of later steps."""
        while self._steps and self._steps[-1] > step:
            self._steps.pop()
            self._packed.pop()


def _unpacked(packed: tuple[tuple[str, ...], bytes]) -> Row:
    names, values = packed
    return dict(zip(names, _decoder.decode(values), strict=True))


class RunLog:
    """Folds events into rows; `is_evaluated` says which steps' rows wait for an evaluation."""

    def __init__(self, is_evaluated: Callable[[int], bool]) -> None:
        self._is_evaluated = is_evaluated
        self._started_unix_s: float | None = None
        self._lineage = ""
        self._first_step: int | None = None
        self._base_written = False
        self._pending: deque[Row] = deque()
        self._newest: Row | None = None  # of those that are written
        self._outcomes: Counter[Outcome] = Counter()
        self._cut_time_s = 0.0
        self._heard_unix_s = 0.0  # time of the newest event
        self._down_s = 0.0  # since the last row: nobody was there to work or to wait
        self._warm_start_s = 0.0
        self._eval_versions: dict[str, int] = {}  # evaluation id -> policy version
        self._evaluations: dict[int, EvaluationFinished] = {}

    def apply(self, event: Event, cut_idle: CutIdle) -> list[Change]:
        """Return the change that the next event makes to the rows."""
        if self._started_unix_s is None:
            self._started_unix_s = event.unix_s
        self._heard_unix_s = max(self._heard_unix_s, event.unix_s)
        match event.body:
            case EpisodeSettled(phase="train", outcome=outcome):
                self._outcomes[outcome] += 1
            case ModelPrepared(warm_start_s=warm_start_s):
                self._warm_start_s = warm_start_s
            case LearnerResumed() as body:
                return self._resume(body)
            case EvaluationStarted() as body:
                self._eval_versions[body.evaluation_id] = body.policy_version
            case EvaluationFinished() as body if body.evaluation_id in self._eval_versions:
                return self._evaluated(event, body, cut_idle)
            case StepFinished() as body if body.lineage == self._lineage:
                self._pending.append(self._step_row(event, body, cut_idle))
                return self._ready_rows()
            case TrainingEnded() as body if body.lineage == self._lineage:
                return self._amend(body.step, {"task_solved": 1})
        return []

    def begin_again(self, now_unix_s: float) -> None:
        """Leave the time between the newest event and now out of the idle time of the next row."""
        if self._started_unix_s is not None:
            self._down_s += max(now_unix_s - self._heard_unix_s, 0.0)

    def _resume(self, body: LearnerResumed) -> list[Change]:
        self._lineage = body.lineage
        if self._first_step is None or body.step < self._first_step:
            self._first_step, self._base_written = body.step, False
        self._pending = deque(row for row in self._pending if _step_of(row) <= body.step)
        self._newest = None
        self._evaluations = {at: done for at, done in self._evaluations.items() if at <= body.step}
        self._eval_versions = dict(list(self._eval_versions.items())[-64:])
        return [Rewind(body.step)]

    def _evaluated(self, event: Event, body: EvaluationFinished, cut_idle: CutIdle) -> list[Change]:
        self._evaluations[body.step] = body
        if body.step == self._first_step and not self._base_written:
            self._base_written = True
            version = self._eval_versions[body.evaluation_id]
            row = self._new_row(event, body.step, version, self._warm_start_s, cut_idle)
            row |= _evaluation_keys(body)
            self._newest = row
            return [row, *self._ready_rows()]
        return self._amend(body.step, _evaluation_keys(body)) or self._ready_rows()

    def _amend(self, step: int, cells: Row) -> list[Change]:
        """Adds to the last row, if it is that of `step`; one that was written is written again."""
        if self._pending:
            if _step_of(self._pending[-1]) == step:
                self._pending[-1] |= cells
            return []
        if self._newest is None or _step_of(self._newest) != step:
            return []
        self._newest = {**self._newest, **cells}
        return [Rewind(step - 1), self._newest]

    def _step_row(self, event: Event, body: StepFinished, cut_idle: CutIdle) -> Row:
        busy_s = body.metrics.get("learner_busy_s") or 0.0
        row = self._new_row(event, body.step, body.policy_version, busy_s, cut_idle)
        row.update({key: body.metrics.get(key) for key in LEARNER_KEYS})
        row.update({key: value for key, value in body.metrics.items() if key not in row})
        if row["num_groups"] is None:
            row["num_groups"] = len(body.group_ids)
        return row

    def _new_row(
        self, event: Event, step: int, policy_version: int, learner_busy_s: float, cut_idle: CutIdle
    ) -> Row:
        """A row with what is known without the learner; it takes the outcomes and idle time so far."""
        assert self._started_unix_s is not None
        time_s = max(event.unix_s - self._started_unix_s, self._cut_time_s)
        row: Row = dict.fromkeys(METRIC_KEYS)
        row |= {"step": step, "time_s": time_s, "policy_version": policy_version}
        row |= {f"outcome/{outcome.value}": self._outcomes[outcome] for outcome in Outcome}
        row |= cut_idle(max(time_s - self._cut_time_s - self._down_s, 0.0), learner_busy_s)
        self._outcomes.clear()
        self._cut_time_s, self._down_s = time_s, 0.0
        return row

    def _ready_rows(self) -> list[Change]:
        """Pending rows up to the first that waits for its evaluation."""
        ready: list[Change] = []
        while self._pending:
            step = _step_of(self._pending[0])
            evaluation = self._evaluations.get(step)
            if evaluation is None and self._is_evaluated(step):
                break
            row = self._pending.popleft()
            if evaluation is not None:
                row |= _evaluation_keys(evaluation)
            self._newest = row
            ready.append(row)
        return ready


def _step_of(row: Row) -> int:
    step = row["step"]
    assert isinstance(step, int)
    return step


def _evaluation_keys(evaluation: EvaluationFinished) -> Row:
    """Its means, of all tags and of each; null without a valid episode."""
    found: dict[str, EvaluationFinished | TagEvaluation] = {"eval": evaluation}
    found |= {f"eval/tag/{tag}": means for tag, means in evaluation.tags.items()}
    if evaluation.greedy is not None:
        found["eval/greedy"] = evaluation.greedy
        found |= {f"eval/greedy/tag/{tag}": means for tag, means in evaluation.greedy_tags.items()}
    row: Row = {}
    for prefix, means in found.items():
        row[f"{prefix}/success_rate"] = means.success_rate if means.num_valid else None
        row[f"{prefix}/reward_mean"] = means.reward_mean if means.num_valid else None
        if isinstance(means, TagEvaluation):
            row |= {f"{prefix}/pass@{k}": rate for k, rate in means.pass_at.items()}
    return row
