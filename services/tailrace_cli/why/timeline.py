"""Events of a run, sorted by group, episode and step.

Times are seconds since the epoch, of the event log where an event has no time of its own, without those
in which the run was stopped.
"""

import math
import sys
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from msgspec.structs import replace

from tailrace_protos.episode import Outcome
from tailrace_protos.event import (
    EpisodeRedelivered,
    EpisodeSettled,
    EvaluationFinished,
    EvaluationStarted,
    Event,
    EventBody,
    GroupAdmitted,
    GroupClosed,
    RunStarted,
    ServerWeightsApplied,
    StepFinished,
)


@dataclass
class Timeline:
    """A run's events, without what no path needs. `applied` holds a time of every server that began to
    serve the version."""

    began: float = 0.0
    ended: float = 0.0
    stopped_s: float = 0.0  # seconds in which the run was stopped
    starts: list[float] = field(default_factory=list)  # by schedulers, the first one too
    admitted: dict[str, float] = field(default_factory=dict)  # by group
    closed: dict[str, float] = field(default_factory=dict)  # by group
    closings: list[tuple[float, str]] = field(default_factory=list)  # the same by time
    slowest: dict[str, EpisodeSettled] = field(default_factory=dict)  # that was played, by group
    evaluated: set[str] = field(default_factory=set)  # groups of evaluations
    episodes: dict[str, EpisodeSettled] = field(default_factory=dict)  # those that were wanted
    num_episodes: int = 0
    first_episode: str = ""
    redelivered: dict[str, float] = field(default_factory=dict)  # newest time, by episode
    applied: dict[int, list[float]] = field(default_factory=dict)  # by policy version
    evaluations: list[tuple[float, float]] = field(default_factory=list)  # begin and end
    steps: list[StepFinished] = field(default_factory=list)  # by their ends, without metrics

    def newest_application(self, policy_version: int, unix_s: float) -> float:
        """Newest time up to `unix_s` at which a server began to serve a version; or minus infinity."""
        times = self.applied.get(policy_version, ())
        return max((time for time in times if time <= unix_s), default=-math.inf)

    def newest_closing(self, unix_s: float) -> tuple[float, str]:
        """Time and id of the newest group that closed before `unix_s`; minus infinity if none did."""
        index = bisect_left(self.closings, (unix_s, ""))
        return self.closings[index - 1] if index else (-math.inf, "")

    def seconds_of_evaluations(self, begin: float, end: float) -> float:
        """Seconds between two times in which an evaluation was under way."""
        return sum(max(0.0, min(end, b) - max(begin, a)) for a, b in self.evaluations)


def _any(_episode_id: str) -> bool:
    return True


def timeline_of(events: Iterable[Event], is_wanted: Callable[[str], bool] = _any) -> Timeline:
    """Sorts the events of a run; without events both ends are 0.

    `is_wanted` chooses the episodes to keep by their ids: a long run has millions.
    """
    found, stops = Timeline(), _Stops()
    evaluation_began: float | None = None
    for event in events:
        stops.note(event)
        now, body = stops.without(event.unix_s), stops.timed_without(event.body)
        found.began = min(found.began or now, now)
        found.ended = max(found.ended, now)
        _sort_in(found, body, now, is_wanted)
        if isinstance(event.body, EvaluationStarted):
            evaluation_began = now
        elif isinstance(event.body, EvaluationFinished) and evaluation_began is not None:
            found.evaluations.append((evaluation_began, now))
            evaluation_began = None
    found.closings = sorted((unix_s, group_id) for group_id, unix_s in found.closed.items())
    found.steps.sort(key=lambda step: step.finished_unix_s)
    found.stopped_s = stops.seconds
    return found


class _Stops:
    """Times between the last event of a scheduler and the start of the next one."""

    def __init__(self) -> None:
        self._begins: list[float] = []
        self._ends: list[float] = []
        self._seconds: list[float] = [0.0]  # of the first stops: of none, of one, ...
        self._newest: float | None = None  # time of the newest event so far

    @property
    def seconds(self) -> float:
        """Length of all of them."""
        return self._seconds[-1]

    def note(self, event: Event) -> None:
        """Take note of the next event of the log."""
        newest = event.unix_s if self._newest is None else self._newest
        if isinstance(event.body, RunStarted) and event.unix_s > newest:
            self._begins.append(newest)
            self._ends.append(event.unix_s)
            self._seconds.append(self.seconds + event.unix_s - newest)
        self._newest = max(newest, event.unix_s)

    def without(self, unix_s: float) -> float:
        """A time less the stops before it."""
        over = bisect_right(self._ends, unix_s)
        of_next = max(0.0, unix_s - self._begins[over]) if over < len(self._begins) else 0.0
        return unix_s - self._seconds[over] - of_next

    def timed_without(self, body: EventBody) -> EventBody:
        """An event whose own times lack the stops before them."""
        if not self._begins or not isinstance(body, EpisodeSettled | StepFinished):
            return body
        begin, end = self.without(body.started_unix_s), self.without(body.finished_unix_s)
        return replace(body, started_unix_s=begin, finished_unix_s=end)


def _sort_in(found: Timeline, body: EventBody, now: float, is_wanted: Callable[[str], bool]) -> None:
    """Add an event of a group, an episode, a step or a server."""
    match body:
        case GroupAdmitted():
            found.admitted.setdefault(sys.intern(body.group_id), now)
        case EpisodeRedelivered():
            found.redelivered[body.episode_id] = now
        case EpisodeSettled():
            _settle(found, body)
            if is_wanted(body.episode_id):
                found.episodes[body.episode_id] = body
        case GroupClosed():
            found.closed[sys.intern(body.group_id)] = now
        case StepFinished():
            group_ids = tuple(map(sys.intern, body.group_ids))
            found.steps.append(replace(body, group_ids=group_ids, metrics={}))
        case RunStarted():
            found.starts.append(now)
        case ServerWeightsApplied():
            found.applied.setdefault(body.policy_version, []).append(now)


def _settle(found: Timeline, body: EpisodeSettled) -> None:
    found.num_episodes += 1
    found.first_episode = found.first_episode or body.episode_id
    if body.phase == "eval":
        found.evaluated.add(sys.intern(body.group_id))
    elif body.outcome is not Outcome.CANCELLED:
        slowest = found.slowest.get(body.group_id)
        if slowest is None or body.finished_unix_s > slowest.finished_unix_s:
            found.slowest[sys.intern(body.group_id)] = body
