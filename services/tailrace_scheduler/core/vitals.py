"""Live status of a run: its phase, latest numbers, failures and hints, the remaining time."""

from collections import deque

from tailrace.config import RunConfig
from tailrace_protos.control import RunStatus
from tailrace_protos.event import (
    EvaluationFinished,
    Event,
    HintChanged,
    LearnerResumed,
    StepFinished,
    WarmStartAdvanced,
)
from tailrace_scheduler.config import SchedulerConfig
from tailrace_scheduler.core.ending import RunEnd
from tailrace_scheduler.core.hints import HintBoard
from tailrace_scheduler.core.run_health import RunHealth, Standing

RECENT_STEPS = 20


class Vitals:
    """Remembers the latest numbers of a run; its failures are in `health`."""

    def __init__(self, run: RunConfig, config: SchedulerConfig, now_s: float) -> None:
        self.health = RunHealth(run, config, now_s)
        self._hints = HintBoard()
        self._max_steps = run.max_steps
        self._started_unix_s: float | None = None
        self._step_times: deque[float] = deque(maxlen=RECENT_STEPS + 1)
        self._metrics: dict[str, float | None] = {}
        self._warm_start = (0, 0)  # steps done, and all
        self._eval_success_rate: float | None = None
        self._eval_greedy_success_rate: float | None = None

    def apply(self, event: Event) -> None:
        """Take note of an event."""
        self.health.apply(event)
        self._hints.apply(event)
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
            case WarmStartAdvanced(step=step, num_steps=num_steps):
                self._warm_start = (step, num_steps)
            case LearnerResumed():
                self._step_times.clear()

    @property
    def raised_hints(self) -> frozenset[str]:
        """Names of the hints that hold."""
        return self._hints.raised

    def take_hints(self) -> list[tuple[str, HintChanged]]:
        """Changes of hints not taken yet, each with an id that no other change has."""
        return self._hints.take_changes()

    def status(self, standing: Standing, end: RunEnd, now_s: float) -> RunStatus:
        """The message for live views."""
        counts, health = standing.counts, self.health
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
            eta_s=0.0 if end.ended_early else self._eta_s(counts.step),
            num_failures=health.num_failures,
            newest_failure=health.newest_failure,
            hints=(*self._hints.texts, *health.stall_hint(now_s, standing)),
            progress_unix_s=health.progress_unix_s,
            failed=end.failed,
            ended_early=end.ended_early,
            warm_start_step=self._warm_start[0],
            warm_start_num_steps=self._warm_start[1],
        )

    def _eta_s(self, step: int) -> float | None:
        """Predict the time of the remaining steps from the pace of the recent ones."""
        if step >= self._max_steps:
            return 0.0
        if len(self._step_times) < 2:
            return None
        pace_s = (self._step_times[-1] - self._step_times[0]) / (len(self._step_times) - 1)
        return pace_s * (self._max_steps - step)
