"""What the core needs from outside: a journal and an observer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from tailrace_protos.episode import TurnRecord


class EpisodeTakenError(Exception):
    """This worker need not play the episode on. Attributes: `episode_id`, `why` (settled, fenced)."""

    def __init__(self, episode_id: str, why: str) -> None:
        super().__init__(f"episode {episode_id} is {why}")
        self.episode_id = episode_id
        self.why = why


class EpisodeJournal(Protocol):
    """The finished turns of one episode, kept beyond this process."""

    async def load(self) -> Sequence[TurnRecord]:
        """Turns that were finished before, in order."""

    async def append(self, record: TurnRecord) -> None:
        """Keep a finished turn durably; raises `EpisodeTakenError` if playing on is of no use."""

    async def clear(self) -> None:
        """Forget all turns."""


class NoJournal:
    """For episodes that nobody resumes."""

    async def load(self) -> Sequence[TurnRecord]:
        """Nothing."""
        return ()

    async def append(self, record: TurnRecord) -> None:
        """Keep nothing."""

    async def clear(self) -> None:
        """Nothing to forget."""


class Observer(Protocol):
    """Sees an episode as it is played: pictures, the terminal. Replayed turns are seen too."""

    def on_reset(self, observation: str) -> None:
        """The environment's first words; again if the episode begins anew."""

    def on_turn(self, reply: str, observation: str, reward: float, done: bool) -> None:
        """The model said `reply`, the environment answered."""
