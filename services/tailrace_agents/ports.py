"""What the core needs from outside: a journal, observers, somebody who draws."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from tailrace.sdk.env import Env
from tailrace_protos.episode import EpisodeTask
from tailrace_protos.journal import JournalRecord


class EpisodeTakenError(Exception):
    """This worker need not play the episode on. Attributes: `episode_id`, `why` (settled, fenced)."""

    def __init__(self, episode_id: str, why: str) -> None:
        super().__init__(f"episode {episode_id} is {why}")
        self.episode_id = episode_id
        self.why = why


class EpisodeJournal(Protocol):
    """What one episode has done, kept beyond this process."""

    @property
    def may_have_records(self) -> bool:
        """Whether somebody may have played this episode before."""

    async def load(self) -> Sequence[JournalRecord]:
        """What was done before, in order."""

    async def append(self, record: JournalRecord) -> None:
        """Keep a record durably; raises `EpisodeTakenError` if playing on is of no use."""

    async def clear(self) -> None:
        """Forget all records."""


class NoJournal:
    """For episodes that nobody resumes."""

    may_have_records = False

    async def load(self) -> Sequence[JournalRecord]:
        """Nothing."""
        return ()

    async def append(self, record: JournalRecord) -> None:
        """Keep nothing."""

    async def clear(self) -> None:
        """Nothing to forget."""


class Observer(Protocol):
    """Sees an episode as it is played: pictures, the terminal. Replayed turns are seen too."""

    def on_reset(self, observation: str) -> None:
        """The environment's first words; again if the episode begins anew."""

    def on_turn(self, reply: str, observation: str, reward: float, done: bool) -> None:
        """The model said `reply`, the environment answered."""


class Recorder(Observer, Protocol):
    """An observer that makes a picture of what it saw."""

    async def save(self) -> None:
        """Write it; never fails."""


class MakeRecorder(Protocol):
    """Who decides which episodes are drawn."""

    def __call__(self, env: Env, task: EpisodeTask) -> Recorder | None:
        """A recorder for this episode, if it is one of those to draw."""


def no_recorder(env: Env, task: EpisodeTask) -> Recorder | None:
    """Draw nothing."""
    return None
