"""Live status of a run: its phase, the learner's latest numbers, the remaining time."""

from collections import deque
from typing import NamedTuple

from tailrace_protos.control import RunStatus
from tailrace_protos.event import EvaluationFinished, Event, LearnerResumed, StepFinished

RECENT_STEPS = 20


class Counts(NamedTuple):
    """Counts of the scheduler at this moment."""

    step: int
    policy_version: int
    num_episodes_running: int
    num_groups_running: int
    num_groups_ready: int
    num_servers: int
    phase: str
    blocked_by: str


class Vitals:
    """Remembers the latest numbers of a run."""

    def __init__(self, max_steps: int) -> None:
        self._max_steps = max_steps
        self._started_unix_s: float | None = None
        self._step_times: deque[float] = deque(maxlen=RECENT_STEPS + 1)
        self._metrics: dict[str, float | None] = {}
        self._eval_success_rate: float | None = None
        self._eval_greedy_success_rate: float | None = None

    def apply(self, event: Event) -> None:
        """Take note of an event."""
        if self._started_unix_s is None:
            self._started_unix_s = event.unix_s
        match event.body:
            case StepFinished(metrics=metrics):
                self._metrics = metrics
                self._step_times.append(event.unix_s)
            case EvaluationFinished() as body:
                if body.num_valid:
                    self._eval_success_rate = body.success_rate
                if body.greedy is not None and body.greedy.num_valid:
                    self._eval_greedy_success_rate = body.greedy.success_rate
            case LearnerResumed():
                self._step_times.clear()

    def status(self, counts: Counts, now_s: float) -> RunStatus:
        """The message for live views."""
        return RunStatus(
            **counts._asdict(),
            max_steps=self._max_steps,
            reward_mean=self._metrics.get("reward_mean"),
            success_rate=self._metrics.get("success_rate"),
            eval_success_rate=self._eval_success_rate,
            eval_greedy_success_rate=self._eval_greedy_success_rate,
            staleness_mean=self._metrics.get("staleness_mean"),
            tokens_per_s=self._metrics.get("tokens_per_s"),
            elapsed_s=max(now_s - self._started_unix_s, 0.0) if self._started_unix_s else 0.0,
            eta_s=self._eta_s(counts.step),
        )

    def _eta_s(self, step: int) -> float | None:
        """Predict the time of the remaining steps from the pace of the recent ones."""
        if step >= self._max_steps:
            return 0.0
        if len(self._step_times) < 2:
            return None
        pace_s = (self._step_times[-1] - self._step_times[0]) / (len(self._step_times) - 1)
        return pace_s * (self._max_steps - step)
