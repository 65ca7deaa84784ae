"""Interfaces of the core: the journal of an episode and its observers."""

from collections.abc import Sequence
from typing import Protocol

from tailrace.ledger import Prompt
from tailrace.sdk.env import Env
from tailrace_protos.chat import ToolCall
from tailrace_protos.episode import EpisodeTask
from tailrace_protos.journal import JournalRecord
from tailrace_protos.session import LedgerNode
from tailrace_protos.tool import ToolResult


class EpisodeTakenError(Exception):
    """This worker must stop playing the episode. Attributes: `episode_id`, `why`.

    `why`: settled; fenced (another worker plays another message of it); redelivered (the same message).
    """

    def __init__(self, episode_id: str, why: str) -> None:
        super().__init__(f"episode {episode_id} is {why}")
        self.episode_id = episode_id
        self.why = why


class EpisodeJournal(Protocol):
    """Durable records of one episode."""

    @property
    def may_have_records(self) -> bool:
        """True if this episode may have been played before."""

    async def load(self) -> Sequence[JournalRecord]:
        """Returns the records so far, in order."""

    async def append(self, record: JournalRecord) -> None:
        """Keeps a record durably; raises `EpisodeTakenError` if another worker has the episode."""

    async def require_own(self) -> None:
        """Raises `EpisodeTakenError` if another worker has loaded the records since."""

    async def clear(self) -> None:
        """Deletes all records."""


class NoJournal:
    """Journal of episodes that are never resumed."""

    may_have_records = False

    async def load(self) -> Sequence[JournalRecord]:
        """Returns nothing."""
        return ()

    async def append(self, record: JournalRecord) -> None:
        """Keeps nothing."""

    async def require_own(self) -> None:
        """Does nothing: no other worker loads them."""

    async def clear(self) -> None:
        """Deletes nothing."""


class LoopObserver(Protocol):
    """Observer of a loop's calls: the terminal. `was_known`: the answer came from the journal."""

    def on_call(self, prompt: Prompt, node: LedgerNode, was_known: bool) -> None:
        """Takes note of a prompt and the model's answer."""

    def on_tool(self, call: ToolCall, result: ToolResult, was_known: bool) -> None:
        """Takes note of a tool's answer."""


class EnvObserver(Protocol):
    """Observer of an environment's episode: pictures, the terminal. It sees replayed turns too."""

    def on_reset(self, observation: str) -> None:
        """Takes the first observation; again if the episode restarts."""

    def on_turn(self, reply: str, observation: str, reward: float, done: bool) -> None:
        """Takes a reply and the environment's answer."""

    async def save(self) -> None:
        """Writes the pictures of the episode, if any; never fails."""


class MakeObserver(Protocol):
    """Factory of observers: pictures of chosen episodes, or the terminal."""

    def __call__(self, env: Env, task: EpisodeTask) -> EnvObserver | None:
        """Makes the observer of an episode, if it has one."""


def no_observer(env: Env, task: EpisodeTask) -> EnvObserver | None:
    """Makes no observer."""
    return None


class Watcher(LoopObserver, Protocol):
    """Observer of episodes of every kind."""

    def recorder(self, env: Env, task: EpisodeTask) -> EnvObserver | None:
        """Returns the observer of an environment's episode."""
