"""Critical path: the chain of stages in which each began when the one before it ended.

The path of a run is followed from its end to its start. A step waits for its newest group or for the
step before it; a group for its slowest member; a member for its admission. An admission waits for the
newest step before it, whose weights reach the servers first; if it came later than that, for a group
that closed and made room. The path of an episode goes from its admission to the end of the step that
trained it.

Invariants: parts do not overlap, none is negative, and their seconds sum to the time from the first to
the last point of the path.
"""

from bisect import bisect_right
from collections.abc import Generator, Iterator, Sequence
from typing import NamedTuple

from tailrace_cli.why.causes import Cause
from tailrace_cli.why.timeline import Timeline
from tailrace_protos.event import EpisodeSettled, StepFinished

_AT_ONCE_S = 0.5  # within which an admission follows what it waited for


class PathPart(NamedTuple):
    """A stage on the path; `place` names the episode, group or step."""

    cause: Cause
    seconds: float
    place: str = ""


def path_of_run(timeline: Timeline) -> list[PathPart]:
    """Critical path of a run, from its end to its start; without a step it has one part."""
    return [part for part in _run(timeline) if part.seconds > 0]


def path_of_episode(timeline: Timeline, episode_id: str) -> list[PathPart]:
    """Path of one episode in the order of time; raises `KeyError` for one that never settled."""
    episode = timeline.episodes[episode_id]
    parts = list(_episode(timeline, episode))[::-1]
    closed = timeline.closed.get(episode.group_id)
    if closed is not None:
        parts.append(PathPart(Cause.GROUP, closed - episode.finished_unix_s, episode.group_id))
        step = next((s for s in timeline.steps if episode.group_id in s.group_ids), None)
        if step is not None:
            full = max(closed, _arrival(timeline, step) or closed, step.started_unix_s)
            full = min(full, step.finished_unix_s)
            parts.append(PathPart(Cause.BATCH, full - closed, _name(step)))
            parts.append(PathPart(Cause.LEARNER, step.finished_unix_s - full, _name(step)))
    return [part for part in parts if part.seconds > 0]


def _run(timeline: Timeline) -> Iterator[PathPart]:
    steps = timeline.steps
    if not steps:
        yield from _with_evaluations(timeline, timeline.began, timeline.ended, Cause.START, "")
        return
    number = len(steps) - 1
    yield from _with_evaluations(
        timeline, steps[-1].finished_unix_s, timeline.ended, Cause.FINISH, "the end of the run"
    )
    while True:
        step = steps[number]
        before = steps[number - 1].finished_unix_s if number else timeline.began
        newest = _newest_group(timeline, step)
        if newest is None or timeline.closed[newest] <= before:
            yield PathPart(Cause.LEARNER, step.finished_unix_s - before, _name(step))
            number -= 1
        else:
            closed = min(timeline.closed[newest], step.finished_unix_s)
            yield PathPart(Cause.LEARNER, step.finished_unix_s - closed, _name(step))
            number = min((yield from _groups(timeline, newest, closed)), number - 1)
        if number < 0:
            return


def _groups(timeline: Timeline, group_id: str, closed: float) -> Generator[PathPart, None, int]:
    """Yields a group, those whose room it took, and the wait before them.

    Returns the index of the step that the first of them waited for; -1: the start of the run.
    """
    while True:
        admitted = yield from _group(timeline, group_id, closed)
        number = _newest_before(timeline.steps, admitted)
        ready = timeline.began
        if number >= 0:
            step = timeline.steps[number]
            ready = timeline.newest_application(step.policy_version, admitted)
            ready = max(ready, step.finished_unix_s)
        closed, group_id = timeline.newest_closing(admitted)
        if admitted - ready <= _AT_ONCE_S or closed <= ready:
            yield from _before_admission(timeline, number, ready, admitted)
            return number
        yield PathPart(Cause.ADMISSION, admitted - closed, f"after {group_id}")


def _group(timeline: Timeline, group_id: str, closed: float) -> Generator[PathPart, None, float]:
    """Yields the parts of a group from its closing on; returns the time of its admission."""
    begin = min(timeline.admitted.get(group_id, closed), closed)
    slowest = timeline.slowest.get(group_id)
    if group_id in timeline.evaluated:
        yield PathPart(Cause.EVALUATION, closed - begin, group_id)
        return begin
    if slowest is None:
        yield PathPart(Cause.GROUP, closed - begin, group_id)
        return begin
    ended = min(max(slowest.finished_unix_s, begin), closed)
    yield PathPart(Cause.GROUP, closed - ended, group_id)
    yield from _episode(timeline, slowest, begin, ended)
    return begin


def _episode(
    timeline: Timeline,
    episode: EpisodeSettled,
    admitted: float | None = None,
    ended: float | None = None,
) -> Iterator[PathPart]:
    """Yields the parts of an episode, the last one first."""
    place, stages = episode.episode_id, episode.stages
    ended = episode.finished_unix_s if ended is None else ended
    started = min(episode.started_unix_s, ended)
    if admitted is None:
        admitted = min(timeline.admitted.get(episode.group_id, started), started)
    started = max(started, admitted)
    left = ended - started
    counted = (
        (Cause.REWARD, stages.reward_s),
        (Cause.DECODE, stages.decode_s or 0.0),
        (Cause.PREFILL, stages.prefill_s or 0.0),
    )
    # Parallel calls sum to more than the time that passed.
    shrink = min(1.0, left / max(sum(seconds for _, seconds in counted), 1e-9))
    for cause, seconds in counted:
        yield PathPart(cause, shrink * seconds, place)
        left -= shrink * seconds
    yield PathPart(Cause.OUTSIDE if stages.prefill_s is None else Cause.TOOLS, left, place)
    again = min(max(timeline.redelivered.get(place, admitted), admitted), started)
    room = min(max(stages.room_s, 0.0), started - again)
    yield PathPart(Cause.QUEUE, started - again - room, place)
    yield PathPart(Cause.ROOM, room, place)
    yield PathPart(Cause.LOST, again - admitted, place)


def _before_admission(
    timeline: Timeline, number: int, ready: float, admitted: float
) -> Iterator[PathPart]:
    """Yields what came between a step, or the start, and an admission; `ready`: weights were there."""
    if number < 0:
        yield from _with_evaluations(timeline, ready, admitted, Cause.START, "")
        return
    step = timeline.steps[number]
    place = f"after {_name(step)}"
    yield from _with_evaluations(timeline, ready, admitted, Cause.ADMISSION, place)
    again = [start for start in timeline.starts if step.finished_unix_s <= start <= ready]
    begun = again[-1] if again else ready
    yield PathPart(Cause.START, ready - begun, f"the start {place}")
    yield PathPart(Cause.WEIGHTS, begun - step.finished_unix_s, place)


def _with_evaluations(
    timeline: Timeline, begin: float, end: float, cause: Cause, place: str
) -> Iterator[PathPart]:
    """Yields the seconds of evaluations in a wait, and the rest of it."""
    evaluated = timeline.seconds_of_evaluations(begin, end)
    yield PathPart(cause, end - begin - evaluated, place)
    yield PathPart(Cause.EVALUATION, evaluated, place)


def _newest_group(timeline: Timeline, step: StepFinished) -> str | None:
    known = [group_id for group_id in step.group_ids if group_id in timeline.closed]
    return max(known, key=timeline.closed.__getitem__, default=None)


def _arrival(timeline: Timeline, step: StepFinished) -> float | None:
    newest = _newest_group(timeline, step)
    return None if newest is None else timeline.closed[newest]


def _newest_before(steps: Sequence[StepFinished], unix_s: float) -> int:
    """Index of the newest step that had ended by then; -1: none."""
    return bisect_right(steps, unix_s, key=lambda step: step.finished_unix_s) - 1


def _name(step: StepFinished) -> str:
    return f"step {step.step}"
