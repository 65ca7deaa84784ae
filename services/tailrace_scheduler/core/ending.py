"""The end of a run, which comes once: it has failed, or all is done."""

from tailrace_protos.event import RunFailed, RunFinished, TaskSolved, TrainingEnded
from tailrace_scheduler.core.decisions import Emit, EndTraining
from tailrace_scheduler.core.lineage import Lineage
from tailrace_scheduler.core.run_health import WARM_START


class RunEnd:
    """Ends in a run's log, and the one that was decided since the start or the learner's return."""

    def __init__(self, max_steps: int) -> None:
        self._max_steps = max_steps
        self.failed: RunFailed | None = None
        self.is_finished = False
        """The run's log holds its end."""
        self.solved: TaskSolved | None = None
        """Training ends before `max_steps`."""
        self.ended_early = ""
        """The reason, and at the end what the final evaluation says."""
        self._ended_step: int | None = None  # the learner's last one, which it told
        self._has_decided_solved = False
        self._num_ends = 0  # of the run, in its log
        self._has_decided = False

    def ended(self, body: RunFinished | RunFailed) -> None:
        """Take an end from the log."""
        self._num_ends += 1
        if isinstance(body, RunFailed):
            self.failed = body
        else:
            self.is_finished = self.is_over(body.step)
            self.ended_early = body.reason if self.solved is not None else ""

    def ends_early(self, body: TaskSolved | TrainingEnded) -> None:
        """Take from the log that training is to end early, or that the learner has done so."""
        if isinstance(body, TaskSolved):
            self.solved, self.ended_early = body, body.reason
        else:
            self._ended_step = body.step

    def resumed(self) -> None:
        """The learner went on from a checkpoint: another end will come."""
        self.is_finished = self._has_decided = self._has_decided_solved = False
        self.solved, self._ended_step, self.ended_early = None, None, ""

    def begin_again(self, *, is_resumed: bool) -> None:
        """A run that is started again may succeed; one that was solved goes on if it is resumed."""
        self.failed = None
        if is_resumed and self.is_finished and self.solved is not None:
            self.resumed()

    @property
    def is_decided(self) -> bool:
        """Tell whether an end has come or was decided."""
        return self._has_decided or self.is_finished or self.failed is not None

    def is_over(self, step: int) -> bool:
        """Tell whether no training group is admitted after `step`."""
        return self.solved is not None or step >= self._max_steps

    def is_last(self, step: int) -> bool:
        """Tell whether the learner makes no step after `step`."""
        return step == self._ended_step or step >= self._max_steps

    def decide_solved(self, solved: TaskSolved | None) -> list[Emit | EndTraining]:
        """Return the end of training that is due, if it is, once."""
        if solved is None or self._has_decided_solved:
            return []
        self._has_decided_solved = True
        # In this order: a scheduler that dies in between decides both again.
        return [
            EndTraining(solved.lineage),
            Emit(f"task_solved/{solved.lineage}/{solved.step}", solved),
        ]

    def decide(
        self, lineage: str, step: int, failed: RunFailed | None, *, is_done: bool, reason: str
    ) -> list[Emit]:
        """Return the end that is due, if any; a failure goes before the finish."""
        self._has_decided = is_done or failed is not None
        if failed is not None:
            return [Emit(f"run_failed/{self._num_ends}", failed)]
        if not is_done:
            return []
        return [Emit(f"run_finished/{lineage}/{step}", RunFinished(step, reason))]

    def phase(self, lineage: Lineage, first_evaluated: bool, has_model: bool) -> str:
        """Return the phase of the run for live views."""
        if self.failed is not None:
            return "failed"
        if not lineage.started:
            return WARM_START if has_model else "starting"
        if self.is_finished:
            return "finished"
        if self.is_over(lineage.step):
            return "finishing"
        return "training" if first_evaluated else "evaluating"
