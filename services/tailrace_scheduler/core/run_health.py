"""Failures of a run, and the rules that end a run early (pure): nothing can succeed, or all does.

Invariants: the same events give the same state; a limit of 0 switches its rule off; a rule that ends
the run says how often the commonest cause was seen, and what to change.
"""

import re
from collections import Counter, deque
from collections.abc import Sequence, Set
from typing import NamedTuple

from tailrace.config import RunConfig
from tailrace_protos.episode import Outcome
from tailrace_protos.event import (
    EpisodeSettled,
    EvaluationFinished,
    Event,
    GroupClosed,
    GroupDropped,
    LearnerResumed,
    RunFailed,
    RunStarted,
    StepFinished,
    TaskSolved,
)
from tailrace_scheduler.config import SchedulerConfig
from tailrace_scheduler.core.untrained import (
    EQUAL_REWARDS,
    OTHER_CAUSE,
    REMEDIES,
    SolvedGroups,
    untrained_cause,
)

FAILED_SHARE = 0.9
SOLVED_SUCCESS = 0.9
"""Success of the final evaluation, sampled or greedy, from which a solved task is a finished run."""
WARM_START = "warm_start"
_STALL_HINT_S = 60.0  # without progress, while no episode is played
_FAILURES = (Outcome.INFRA_FAILURE, Outcome.TIMEOUT)
_REMEMBERED = 512  # failures, for the commonest reason
_FIRST_STEPS = 3  # of an experiment, in which a server with short sequences ends the run
_DIGITS = re.compile(r"0x[0-9a-f]+|\b(?=[a-f]*\d)[0-9a-f]{4,}\b|\d+")  # ids of calls are hexadecimal
_OF_REWARD, _OF_GENERATION = re.compile(r"^reward:"), re.compile(r"generation \S+ failed")


class Counts(NamedTuple):
    """Counts of the scheduler at this moment; fields of `RunStatus`."""

    step: int
    policy_version: int
    num_episodes_running: int
    num_groups_running: int
    num_groups_ready: int
    num_servers: int
    phase: str
    blocked_by: str


class Standing(NamedTuple):
    """Standing of the run: what it has, and what it waits for."""

    counts: Counts
    is_started: bool  # by a learner
    is_current: bool  # all servers serve the newest weights
    learner_has_work: bool
    num_open: int  # published episodes that have not ended
    num_waiting: int = 0  # groups with an episode that no agent outside has leased yet
    short_server: str = ""  # text on a server that cannot hold the longest episode

    def waits_for(self) -> tuple[str, str]:
        """The service whose log says more, and what keeps the run from going on."""
        if not self.is_started:
            return "learner", "the learner has not loaded its model yet (learner.log)"
        if not self.counts.num_servers:
            return "inference", "no inference server is ready (inference*.log)"
        if not self.is_current:
            return "inference", "inference servers do not serve the newest weights (inference*.log)"
        if self.learner_has_work:
            return "learner", "the learner does not train the groups that wait for it (learner.log)"
        if self.num_waiting:
            text = f"{self.num_waiting} groups wait for agents outside to lease their episodes"
            return "agents", f"{text}: start agents (POST /v1/episodes)"
        if self.num_open:
            num_played = self.counts.num_episodes_running
            text = f"{self.num_open} episodes do not end, agents workers play {num_played} of them"
            return "agents", f"{text} (agents*.log)"
        if self.counts.num_groups_running:
            text = "episodes wait for an agents worker, or for room on an inference server"
            return "agents", f"{text} (agents*.log)"
        if self.counts.phase == "finishing":
            return "learner", "the last checkpoint is missing (learner.log)"
        return "scheduler", f"no episode is admitted; blocked by: {self.counts.blocked_by or 'nothing'}"


class RunHealth:
    """Failures and progress of one run."""

    def __init__(self, run: RunConfig, config: SchedulerConfig, now_s: float) -> None:
        self._run = run
        self._config = config
        self.num_failures = 0
        self.newest_failure = ""
        self._recent: deque[str] = deque(maxlen=_REMEMBERED)  # reasons
        self._open: dict[str, set[Outcome]] = {}  # of groups that have not closed
        self._num_steps = 0
        self._config_digest = ""
        self._num_first_steps = 0  # since the experiment changed
        self._num_trained_steps = 0
        self._num_failed_in_row = 0  # groups
        self._window: deque[bool] = deque(maxlen=config.failed_groups_window or 1)
        self._failing_since_s: float | None = None
        self._num_untrained = 0  # groups, since the last step that trained a token
        self._causes: Counter[str] = Counter()  # of these
        self._solved_groups = SolvedGroups()  # of these
        self._solved: TaskSolved | None = None
        self._lineage = ""
        self._newest_evaluation: EvaluationFinished | None = None
        self.begin(now_s)

    def begin(self, now_s: float) -> None:
        """This process watches from now on: how long ago something came before it says nothing."""
        self._is_first_resume = True
        self.progress_unix_s = now_s
        if self._failing_since_s is not None:
            self._failing_since_s = now_s

    def apply(self, event: Event) -> None:
        """Take note of an event."""
        match event.body:
            case EpisodeSettled() as body:
                self._settled(body, event.unix_s)
            case GroupClosed() as body:
                self._closed(body, event.unix_s)
            case GroupDropped(group_id=group_id, reason=reason):
                self._untrained(reason, [group_id])
            case StepFinished() as body:
                self._stepped(body, event.unix_s)
            case EvaluationFinished() as body:
                self._newest_evaluation = body
                self.progress_unix_s = max(self.progress_unix_s, event.unix_s)
            case RunStarted(config_digest=digest) if digest != self._config_digest:
                self._config_digest, self._num_first_steps = digest, 0
            case LearnerResumed(lineage=lineage):
                self._resumed(lineage, event.unix_s)
            case TaskSolved() as body if body.lineage == self._lineage:
                self._solved = body
                self._forgive()
            case RunFailed():
                self._forgive()

    def verdict(self, now_s: float, standing: Standing) -> RunFailed | None:
        """The reason to end the run now, if there is one."""
        step = standing.counts.step
        if standing.short_server and self._num_first_steps < _FIRST_STEPS:
            return RunFailed("short_sequences", step, standing.short_server, "inference")
        return (
            self._failed_groups(now_s, step)
            or self._untrained_steps(step)
            or self._stall(now_s, standing)
        )

    def solved(self, lineage: str, step: int) -> TaskSolved | None:
        """The end of training that is due because nearly every episode succeeds, if it is."""
        if self._solved is not None or not self._is_untrained or not self._solved_groups.are_solved:
            return None
        num_solved = self._solved_groups.num_solved
        share = "" if num_solved == self._num_untrained else f"{num_solved} of "
        text = (
            f"the task is solved: all episodes of {share}the last {self._num_untrained} groups "
            "succeeded, so no token was trained in the groups of "
            f"{self._num_untrained // self._run.groups_per_step} steps (scheduler.max_untrained_steps)"
        )
        return TaskSolved(lineage, step, self._num_untrained, text)

    def final_verdict(self, step: int) -> RunFailed | None:
        """The reason why a run that did all its steps, or solved its task, has failed nevertheless."""
        evaluation = self._newest_evaluation
        if self._solved is not None:
            return self._unlike_evaluation(self._solved, step)
        if self._num_steps and not self._num_trained_steps:
            reason = f"the run made {self._num_steps} steps and trained no token; {self._cause()}"
            return RunFailed("trained_nothing", step, reason, "learner")
        if not self._run.max_steps and evaluation is not None and not evaluation.num_valid:
            reason = f"no episode of the evaluation was valid; {self.commonest()}"
            return RunFailed("evaluated_nothing", step, reason, self._service())
        return None

    def finish(self) -> str:
        """Reason for the end of a run that has finished."""
        if self._solved is None:
            return "all steps, the final checkpoint and the final evaluation are done"
        return f"{self._solved.reason}; {self._final_success()[1]}"

    def commonest(self) -> str:
        """The commonest reason among the newest failures, and how often it was seen."""
        if not self._recent:
            return "no episode has failed"
        alike = Counter(map(alike_text, self._recent))
        key, count = alike.most_common(1)[0]
        example = next(reason for reason in reversed(self._recent) if alike_text(reason) == key)
        return f"{count} of the last {len(self._recent)} failures: {example}"

    def stall_hint(self, now_s: float, standing: Standing) -> list[str]:
        """A hint while nothing happens for longer than tasks may take."""
        stalled_s = now_s - self.progress_unix_s
        allowed_s = (
            self._config.group_timeout_s if standing.counts.num_episodes_running else _STALL_HINT_S
        )
        if stalled_s < allowed_s or standing.counts.phase in (WARM_START, "finished", "failed"):
            return []
        return [f"no progress for {stalled_s:.0f} s: {standing.waits_for()[1]}"]

    # Events

    def _settled(self, body: EpisodeSettled, unix_s: float) -> None:
        self._open.setdefault(body.group_id, set()).add(body.outcome)
        if body.phase == "train":
            self._solved_groups.settled(body)
        if body.outcome.is_valid:
            self.progress_unix_s = max(self.progress_unix_s, unix_s)
        elif body.outcome in _FAILURES:
            self.num_failures += 1
            self.newest_failure = body.reason or body.outcome.value
            self._recent.append(self.newest_failure)

    def _closed(self, body: GroupClosed, unix_s: float) -> None:
        outcomes, is_train = self._open.pop(body.group_id, set()), body.phase == "train"
        if is_train:
            self._solved_groups.closed(body)
        if Outcome.CANCELLED in outcomes and not body.num_valid:
            return
        has_failed = outcomes == {Outcome.INFRA_FAILURE}
        is_void = has_failed or self._is_late(outcomes, body)
        self._num_failed_in_row = self._num_failed_in_row + 1 if is_void else 0
        if not is_train:
            return
        if not body.sent_to_learner and not has_failed:
            self._untrained("too_few_valid", [body.group_id])
        self._looked_at(has_failed, unix_s)

    def _is_late(self, outcomes: Set[Outcome], body: GroupClosed) -> bool:
        """Tell whether no member was in time before the first step.

        Later ones do not count: an outage of a server makes many at once.
        """
        return bool(outcomes) and not self._num_steps and not body.num_valid

    def _looked_at(self, has_failed: bool, unix_s: float) -> None:
        """Moves the window of training groups on by one."""
        self._window.append(has_failed)
        is_failing = self._window.count(True) > FAILED_SHARE * (self._window.maxlen or 1)
        if not is_failing:
            self._failing_since_s = None
        elif self._failing_since_s is None:
            self._failing_since_s = unix_s

    def _stepped(self, body: StepFinished, unix_s: float) -> None:
        self._num_steps += 1
        self._num_first_steps += 1
        self.progress_unix_s = max(self.progress_unix_s, unix_s)
        cause = untrained_cause(body.metrics)
        if cause is not None:
            self._untrained(cause, body.group_ids)
            return
        self._num_trained_steps += 1
        self._has_trained()

    def _resumed(self, lineage: str, unix_s: float) -> None:
        self._lineage, self._solved = lineage, None
        if self._is_first_resume:
            self._is_first_resume = False
            self.progress_unix_s = max(self.progress_unix_s, unix_s)

    def _untrained(self, cause: str, group_ids: Sequence[str]) -> None:
        self._num_untrained += len(group_ids)
        self._causes[cause] += len(group_ids)
        self._solved_groups.untrained(group_ids)

    def _has_trained(self) -> None:
        self._num_untrained = 0
        self._causes.clear()
        self._solved_groups.begin_again()

    def _forgive(self) -> None:
        """The run has ended by a rule: if it is resumed, it is measured anew."""
        self._has_trained()
        self._num_failed_in_row = 0
        self._window.clear()
        self._failing_since_s = None
        self._recent.clear()

    # Rules

    def _failed_groups(self, now_s: float, step: int) -> RunFailed | None:
        config, text = self._config, ""
        if not self._num_steps:
            if 0 < config.max_failed_groups <= self._num_failed_in_row:
                text = (
                    f"{self._num_failed_in_row} groups in a row ended without a valid episode, before "
                    "the first step (scheduler.max_failed_groups)"
                )
        elif self._failing_since_s is not None and config.failed_groups_window:
            failing_s = now_s - self._failing_since_s
            if failing_s >= config.failed_groups_grace_s:
                text = (
                    f"{self._window.count(True)} of the last {len(self._window)} groups failed as a "
                    f"whole, for {failing_s:.0f} s (scheduler.failed_groups_window)"
                )
        if not text:
            return None
        return RunFailed("failed_groups", step, f"{text}; {self.commonest()}", self._service())

    @property
    def _is_untrained(self) -> bool:
        limit = self._config.max_untrained_steps
        return limit > 0 and self._num_untrained >= limit * self._run.groups_per_step

    def _untrained_steps(self, step: int) -> RunFailed | None:
        if self._solved is not None or not self._is_untrained or self._solved_groups.are_solved:
            return None
        text = (
            f"no token was trained in the groups of {self._num_untrained // self._run.groups_per_step} "
            f"steps (scheduler.max_untrained_steps); {self._cause()}"
        )
        return RunFailed("untrained_steps", step, text, "learner")

    def _unlike_evaluation(self, solved: TaskSolved, step: int) -> RunFailed | None:
        """The failure of a run whose training tasks are solved, but not those of its evaluation."""
        success, text = self._final_success()
        if success is None or success >= SOLVED_SUCCESS:
            return None
        remedy = "train on more tasks, or on such as the evaluation has, or lower max_steps"
        return RunFailed("untrained_steps", step, f"{solved.reason}; but {text}: {remedy}", "learner")

    def _final_success(self) -> tuple[float | None, str]:
        """Success of the newest evaluation, the better of sampled and greedy, and its text."""
        evaluation = self._newest_evaluation
        found: dict[str, float] = {}
        if evaluation is not None and evaluation.num_valid:
            found["sampled"] = evaluation.success_rate
        if evaluation is not None and evaluation.greedy is not None and evaluation.greedy.num_valid:
            found["greedy"] = evaluation.greedy.success_rate
        if not found:
            return None, "no episode of the final evaluation was valid"
        values = ", ".join(f"{value:.3f} {how}" for how, value in found.items())
        return max(found.values()), f"success of the final evaluation: {values}"

    def _stall(self, now_s: float, standing: Standing) -> RunFailed | None:
        limit, stalled_s = self._config.stall_timeout_s, now_s - self.progress_unix_s
        is_short = stalled_s < limit + self._config.group_timeout_s
        if not limit or is_short or standing.counts.phase == WARM_START:
            return None
        service, waits_for = standing.waits_for()
        text = (
            f"no valid episode, step or evaluation for {stalled_s:.0f} s (scheduler.stall_timeout_s "
            f"beyond group_timeout_s): {waits_for}"
        )
        if self._recent:
            text += f"; {self.commonest()}"
        return RunFailed("stall", standing.counts.step, text, service)

    def _cause(self) -> str:
        """The commonest cause of untrained groups, with its remedy.

        Of two that are as common, equal rewards come last: healthy runs have them too.
        """
        if not self._causes:
            return OTHER_CAUSE
        cause = max(self._causes, key=lambda one: (self._causes[one], one != EQUAL_REWARDS))
        share = f"in {self._causes[cause]} of {self._causes.total()} groups"
        text = f"{share} {REMEDIES.get(cause, OTHER_CAUSE)}"
        return f"{text}; {self.commonest()}" if cause == "too_few_valid" else text

    def _service(self) -> str:
        """The service whose log tells most of the newest failures."""
        if _OF_REWARD.search(self.newest_failure):
            return "reward"
        return "inference" if _OF_GENERATION.search(self.newest_failure) else "agents"


def alike_text(reason: str) -> str:
    """A reason without its numbers, by which reasons are compared."""
    return _DIGITS.sub("#", reason)
