"""Metrics, log lines and spans of the learner's work."""

from collections.abc import Sequence

import msgspec

from tailrace import tracing
from tailrace.log import get_logger
from tailrace_learner import metrics
from tailrace_learner.core.batch.malformed import flaws
from tailrace_learner.core.batch.rows import PreparedGroup
from tailrace_learner.core.mismatch.drift import DRIFT
from tailrace_learner.core.step.progress import Timing
from tailrace_protos.event import ServerQuarantined, StepFinished
from tailrace_protos.trajectory import TrajectoryGroup

log = get_logger(__name__)

_DRIFT_REMEDY = (
    "it is restarted; if new servers differ as much, give learner and inference one dtype and one "
    "temperature, or raise learner.max_mismatch"
)
_REFERENCE_REMEDY = (
    "their divergence is unknown, and updates whose loss holds it are skipped: check the weights of "
    "the reference (learner.reference.pretrain), and learner.model_args.dtype"
)
_UNNAMED_REMEDY = (
    "set granularity: step for loops and workflows, or use another adv_estimator: turns whose "
    "observation is not known have no step advantage"
)
_MAX_UNREAD_STEPS = 20
_FLAW_REMEDY = (
    "they are left out, the other members stay; check that agents and learner have the same version"
)


def observe_group(prepared: PreparedGroup) -> None:
    """Counts a group, and names the members that are malformed."""
    outcome, counts = "trained" if prepared.rows else "without_rows", prepared.counts
    metrics.GROUPS.labels(prepared.drop_reason or outcome).inc()
    for reason in ("stale", "nonfinite"):
        metrics.MASKED_TOKENS.labels(reason).inc(counts.get(f"num_{reason}_tokens", 0))
    if found := flaws(prepared.counts):
        log.error("malformed episodes", group_id=prepared.group_id, flaws=found, remedy=_FLAW_REMEDY)


def observe_step(step: int, timing: Timing, numbers: dict[str, float | None]) -> None:
    """Shows a finished step."""
    metrics.STEP.set(step)
    metrics.BUSY_SECONDS.observe(timing.busy_s)
    metrics.WAIT_SECONDS.observe(timing.wait_s)
    metrics.TRAINED_TOKENS.inc(numbers["num_trained_tokens"] or 0.0)
    metrics.SKIPPED_UPDATES.inc(numbers["num_skipped_updates"] or 0.0)
    # Some were left out with their group, others when their server was found wrong.
    metrics.MASKED_TOKENS.labels("quarantined").inc(numbers["num_quarantined_tokens"] or 0.0)
    if num_tokens := numbers.get("num_nonfinite_ref_tokens"):
        log.error(
            "log-probabilities of the reference are not finite",
            step=step,
            num_tokens=num_tokens,
            remedy=_REFERENCE_REMEDY,
        )
    if num_turns := numbers.get("num_unnamed_turns"):
        log.warning("turns without observation", step=step, num_turns=num_turns, remedy=_UNNAMED_REMEDY)


class DriftSeries:
    """Exports how far the servers' log-probabilities are from the learner's.

    A server that is gone keeps no series: an alert would hold to the end of the run.
    """

    def __init__(self) -> None:
        self._unread_steps: dict[str, int] = {}  # by server id: steps without a reading

    def show(self, numbers: dict[str, float | None]) -> None:
        """Shows the readings of a step; a server may have none in a few steps."""
        for server_id in self._unread_steps:
            self._unread_steps[server_id] += 1
        for name, error in numbers.items():
            if name.startswith(DRIFT) and error is not None:
                server_id = name.removeprefix(DRIFT)
                metrics.DRIFT.labels(server_id).set(error)
                self._unread_steps[server_id] = 0
        for server_id, num_steps in list(self._unread_steps.items()):
            if num_steps > _MAX_UNREAD_STEPS:
                metrics.DRIFT.remove(server_id)
                del self._unread_steps[server_id]
        _tell_of_shared_drift(numbers)


def _tell_of_shared_drift(numbers: dict[str, float | None]) -> None:
    if num_servers := numbers.get("num_servers_beyond_mismatch"):
        log.error(
            "all servers differ from the learner, none is quarantined",
            num_servers=num_servers,
            remedy=_DRIFT_REMEDY,
        )


def observe_quarantine(found: Sequence[ServerQuarantined]) -> None:
    """Counts and names the servers that were found wrong."""
    for event in found:
        metrics.QUARANTINES.inc()
        log.error("inference server quarantined", **msgspec.structs.asdict(event), remedy=_DRIFT_REMEDY)


class StepTrace:
    """Spans of one step: the wait of its sampled episodes in the buffer, their training, the step.

    A step trains many episodes. Its own spans are in the trace of the first sampled one; the other
    sampled episodes have a span that links to it.
    """

    def __init__(self) -> None:
        self._taken: list[tuple[str, float]] = []  # by episode: traceparent of its root, Unix time

    def take(self, groups: Sequence[TrajectoryGroup], now_unix_s: float) -> None:
        """Records how long the sampled episodes of new groups waited in the buffer."""
        for group in groups:
            for member in group.members:
                if root := tracing.episode(member.episode_id):
                    self._taken.append((root, now_unix_s))
                    tracing.record("buffer", root, member.finished_unix_s, now_unix_s)

    def end(self, finished: StepFinished) -> str:
        """Records the step; returns the `traceparent` of its span, empty without a sampled episode."""
        if not self._taken:
            return ""
        (first, begun_unix_s), *others = self._taken
        step = tracing.record(
            "train step",
            first,
            begun_unix_s,
            finished.finished_unix_s,
            links=[root for root, _ in others],
            step=finished.step,
            num_groups=len(finished.group_ids),
        )
        for root, taken_unix_s in others:
            ended = finished.finished_unix_s
            tracing.record("train", root, taken_unix_s, ended, links=[step], step=finished.step)
        return step
