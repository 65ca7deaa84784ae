"""Digest of a run's `events.jsonl` for its report, read on from where the last reading ended."""

from collections import Counter, defaultdict
from pathlib import Path

from tailrace_cli.run_folders import read_event
from tailrace_cli.summary import HEALTH_MARKS, HealthLog
from tailrace_protos.event import (
    EpisodeSettled,
    EvaluationFinished,
    EventBody,
    GroupClosed,
    GroupDropped,
    StepFinished,
    WeightsPublished,
)
from tailrace_protos.subjects import PHASES

_MARKS = (
    *HEALTH_MARKS,
    b'"episode_settled"',
    b'"step_finished"',
    b'"weights_published"',
    b'"group_dropped"',
    b'"sent_to_learner":false',
)


class RunDigest:
    """Counts of a run's episodes; numbers of episodes by value, so that memory has a bound."""

    def __init__(self, events: Path) -> None:
        self._events = events
        self._offset = 0  # bytes read
        self._step_of_version: dict[int, int] = {}
        self._oldest: defaultdict[str, list[int]] = defaultdict(
            list
        )  # by group that waits for its step
        self.health = HealthLog()
        self.outcomes = {phase: Counter[str]() for phase in PHASES}
        self.lengths = Counter[int]()  # sampled tokens of valid training episodes
        self.turns = Counter[int]()  # of the same
        self.staleness = Counter[int]()  # steps from an episode's oldest weights to its training
        self.evaluations: dict[int, str] = {}  # newest finished one of each step

    def read_on(self) -> None:
        """Take in the lines that were written since the last call; a torn last one waits."""
        if not self._events.exists():
            return
        with self._events.open("rb") as lines:
            lines.seek(self._offset)
            for line in lines:
                if not line.endswith(b"\n"):
                    return
                self._offset += len(line)
                if any(mark in line for mark in _MARKS):
                    self._apply(read_event(self._events, line).body)

    def _apply(self, body: EventBody) -> None:
        self.health.apply(body)
        match body:
            case EpisodeSettled():
                self._settle(body)
            case WeightsPublished(policy_version=version, optimizer_step=step):
                self._step_of_version[version] = step
            case StepFinished(step=step, group_ids=group_ids):
                for group_id in group_ids:
                    self._train(group_id, step)
            case (
                GroupDropped(group_id=group_id) | GroupClosed(group_id=group_id, sent_to_learner=False)
            ):
                self._oldest.pop(group_id, None)
            case EvaluationFinished(step=step, evaluation_id=evaluation_id):
                self.evaluations[step] = evaluation_id

    def _settle(self, episode: EpisodeSettled) -> None:
        self.outcomes[episode.phase][episode.outcome.value] += 1
        if episode.phase == "train" and episode.outcome.is_valid:
            self.lengths[episode.num_sampled_tokens] += 1
            self.turns[episode.num_turns] += 1
            self._oldest[episode.group_id].append(episode.min_policy_version)

    def _train(self, group_id: str, step: int) -> None:
        for version in self._oldest.pop(group_id, ()):
            if version in self._step_of_version:
                self.staleness[step - 1 - self._step_of_version[version]] += 1
