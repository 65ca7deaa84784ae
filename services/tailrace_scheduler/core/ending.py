"""The end of a run, which comes once: it has failed, or all is done."""

from tailrace_protos.event import RunFailed, RunFinished
from tailrace_scheduler.core.decisions import Emit
from tailrace_scheduler.core.lineage import Lineage
from tailrace_scheduler.core.run_health import WARM_START


class RunEnd:
    """Ends in a run's log, and the one that was decided since the start or the learner's return."""

    def __init__(self, max_steps: int) -> None:
        self._max_steps = max_steps
        self.failed: RunFailed | None = None
        self.is_finished = False
        """The run's log holds its end."""
        self._num_failed_ends = 0  # of the run, in its log
        self._has_decided = False

    def ended(self, body: RunFinished | RunFailed) -> None:
        """Take an end from the log."""
        if isinstance(body, RunFailed):
            self.failed = body
            self._num_failed_ends += 1
        else:
            self.is_finished = body.step >= self._max_steps

    def resumed(self) -> None:
        """The learner went on from a checkpoint: another end will come."""
        self.is_finished = self._has_decided = False

    @property
    def is_decided(self) -> bool:
        """Tell whether an end has come or was decided."""
        return self._has_decided or self.is_finished or self.failed is not None

    def decide(self, lineage: str, step: int, failed: RunFailed | None, *, is_done: bool) -> list[Emit]:
        """Return the end that is due, if any; a failure goes before the finish."""
        self._has_decided = is_done or failed is not None
        if failed is not None:
            return [Emit(f"run_failed/{self._num_failed_ends}", failed)]
        if not is_done:
            return []
        done = RunFinished(step, "all steps, the final checkpoint and the final evaluation are done")
        return [Emit(f"run_finished/{lineage}/{step}", done)]

    def phase(self, lineage: Lineage, first_evaluated: bool, has_model: bool) -> str:
        """Return the phase of the run for live views."""
        if self.failed is not None:
            return "failed"
        if not lineage.started:
            return WARM_START if has_model else "starting"
        if self.is_finished:
            return "finished"
        if lineage.step >= self._max_steps:
            return "finishing"
        return "training" if first_evaluated else "evaluating"
