"""Events of a run, sorted by group, episode and step.

Times are seconds since the epoch, of the event log where an event has no time of its own, without those
in which the run was stopped.
"""

import math
from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass, field

from msgspec.structs import replace

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
    """A run's events. `applied` holds a time of every server that began to serve the version."""

    began: float = 0.0
    ended: float = 0.0
    stopped_s: float = 0.0  # seconds in which the run was stopped
    starts: list[float] = field(default_factory=list)  # by schedulers, the first one too
    admitted: dict[str, float] = field(default_factory=dict)  # by group
    closed: dict[str, float] = field(default_factory=dict)  # by group
    closings: list[tuple[float, str]] = field(default_factory=list)  # the same by time
    members: dict[str, list[EpisodeSettled]] = field(default_factory=dict)  # by group
    episodes: dict[str, EpisodeSettled] = field(default_factory=dict)
    redelivered: dict[str, float] = field(default_factory=dict)  # newest time, by episode
    applied: dict[int, list[float]] = field(default_factory=dict)  # by policy version
    evaluations: list[tuple[float, float]] = field(default_factory=list)  # begin and end
    steps: list[StepFinished] = field(default_factory=list)  # in the order of their ends

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


def timeline_of(events: Iterable[Event]) -> Timeline:
    """Sorts the events of a run; without events both ends are 0."""
    found, stops = Timeline(), _Stops()
    evaluation_began: float | None = None
    for event in events:
        stops.note(event)
        now, body = stops.without(event.unix_s), stops.timed_without(event.body)
        found.began = min(found.began or now, now)
        found.ended = max(found.ended, now)
        _sort_in(found, body, now)
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
        self._spans: list[tuple[float, float]] = []
        self._newest: float | None = None  # time of the newest event so far

    @property
    def seconds(self) -> float:
        """Length of all of them."""
        return sum(end - begin for begin, end in self._spans)

    def note(self, event: Event) -> None:
        """Take note of the next event of the log."""
        newest = event.unix_s if self._newest is None else self._newest
        if isinstance(event.body, RunStarted) and event.unix_s > newest:
            self._spans.append((newest, event.unix_s))
        self._newest = max(newest, event.unix_s)

    def without(self, unix_s: float) -> float:
        """A time less the stops before it."""
        return unix_s - sum(max(0.0, min(unix_s, end) - begin) for begin, end in self._spans)

    def timed_without(self, body: EventBody) -> EventBody:
        """An event whose own times lack the stops before them."""
        if not self._spans or not isinstance(body, EpisodeSettled | StepFinished):
            return body
        begin, end = self.without(body.started_unix_s), self.without(body.finished_unix_s)
        return replace(body, started_unix_s=begin, finished_unix_s=end)


def _sort_in(found: Timeline, body: EventBody, now: float) -> None:
    """Add an event of a group, an episode, a step or a server."""
    match body:
        case GroupAdmitted():
            found.admitted.setdefault(body.group_id, now)
        case EpisodeRedelivered():
            found.redelivered[body.episode_id] = now
        case EpisodeSettled():
            found.episodes[body.episode_id] = body
            found.members.setdefault(body.group_id, []).append(body)
        case GroupClosed():
            found.closed[body.group_id] = now
        case StepFinished():
            found.steps.append(body)
        case RunStarted():
            found.starts.append(now)
        case ServerWeightsApplied():
            found.applied.setdefault(body.policy_version, []).append(now)
