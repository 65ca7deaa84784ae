"""Transcripts of episodes: turns, rewards and the rows to train, from a ledger or from the gateway."""

from collections.abc import Mapping, Sequence
from typing import Protocol

import msgspec
import numpy as np

from tailrace.ledger import Ledger
from tailrace_protos.base import as_uint8
from tailrace_protos.chat import ChatMessage
from tailrace_protos.session import ExportStyle, RewardScope, SessionExport
from tailrace_protos.trajectory import TokenRow


class Transcript(Protocol):
    """Inserted and sampled tokens of one episode, with the rewards of its turns."""

    @property
    def num_turns(self) -> int:
        """Finished turns: model calls, or turns that the environment answered."""

    @property
    def num_sampled(self) -> int:
        """Tokens sampled over all turns."""

    @property
    def num_nonfinite(self) -> int:
        """Sampled tokens whose log-probability is not finite; they are not trained."""

    @property
    def turn_rewards(self) -> tuple[float, ...]:
        """Reward of each turn."""

    def __len__(self) -> int:
        """Tokens, inserted and sampled."""
        ...

    def messages(self) -> Sequence[ChatMessage]:
        """Messages of the last conversation."""

    def counts(self) -> Mapping[str, float]:
        """Counts that become metrics of the episode."""

    @property
    def faults(self) -> Sequence[str]:
        """Limits that were used up and faults of replies that nothing continued: played code that
        fails with these failed because of the policy."""

    def rows(self, reward: float) -> tuple[TokenRow, ...]:
        """Exports the rows to train, once the episode's return `reward` is known."""


class LedgerTranscript:
    """Base of transcripts that a ledger keeps."""

    __slots__ = ("ledger", "style")

    def __init__(self, ledger: Ledger, style: ExportStyle) -> None:
        self.ledger = ledger
        self.style = style

    @property
    def num_sampled(self) -> int:
        """See `Transcript`."""
        return self.ledger.num_sampled

    @property
    def num_nonfinite(self) -> int:
        """See `Transcript`."""
        return self.ledger.num_nonfinite

    def __len__(self) -> int:
        return self.ledger.num_tokens

    def messages(self) -> Sequence[ChatMessage]:
        """See `Transcript`."""
        return self.ledger.messages() if len(self.ledger) else ()


class LoopTranscript(LedgerTranscript):
    """`Transcript` of an agent loop: its turns are model calls, its rows the ledger's export."""

    __slots__ = ("_scope", "_turn_discount")

    def __init__(
        self, ledger: Ledger, style: ExportStyle, turn_discount: float, scope: RewardScope
    ) -> None:
        super().__init__(ledger, style)
        self._turn_discount = turn_discount
        self._scope = scope

    @property
    def num_turns(self) -> int:
        """See `Transcript`."""
        return len(self.ledger)

    @property
    def turn_rewards(self) -> tuple[float, ...]:
        """See `Transcript`; a call without a reward counts 0."""
        return tuple(reward or 0.0 for reward in self.ledger.rewards)

    def counts(self) -> Mapping[str, float]:
        """See `Transcript`."""
        return self.ledger.counts()

    @property
    def faults(self) -> Sequence[str]:
        """See `Transcript`."""
        return self.ledger.faults

    def rows(self, reward: float) -> tuple[TokenRow, ...]:
        """See `Transcript`. The rewards of all calls are made to sum to `reward`."""
        if not len(self.ledger):
            return ()
        self.ledger.settle(reward)
        return self.ledger.rows(self.style, self._turn_discount, self._scope)


class EnvTranscript(LedgerTranscript):
    """`Transcript` of an environment: one line of turns that the environment rewarded."""

    __slots__ = ("_hashes", "_rewards")

    faults = ()  # an environment must answer any reply

    def __init__(self, ledger: Ledger, style: ExportStyle) -> None:
        super().__init__(ledger, style)
        self._rewards: list[float] = []
        self._hashes: list[int] = []

    @property
    def num_turns(self) -> int:
        """See `Transcript`."""
        return len(self._rewards)

    @property
    def turn_rewards(self) -> tuple[float, ...]:
        """See `Transcript`."""
        return tuple(self._rewards)

    def finish_turn(self, reward: float, observed: int) -> None:
        """Adds the reward of the newest call; `observed` is the hash of the observation before it."""
        self._rewards.append(reward)
        self._hashes.append(observed)

    def counts(self) -> Mapping[str, float]:
        """See `Transcript`; beside it an environment has its own metrics only."""
        num_cut = self.ledger.num_cut_replies
        return {"num_cut_replies": float(num_cut)} if num_cut else {}

    def rows(self, reward: float) -> tuple[TokenRow, ...]:
        """See `Transcript`. Turns keep the environment's rewards; each row is credited `reward`."""
        return self.ledger.turn_rows(self.style, reward, self._rewards, self._hashes)


class SessionTranscript:
    """`Transcript` that a gateway kept; empty until the session is exported."""

    def __init__(self) -> None:
        self._export = SessionExport()

    def take(self, export: SessionExport) -> None:
        """Takes over the session's export."""
        self._export = export

    @property
    def num_turns(self) -> int:
        """See `Transcript`."""
        return int(self._export.metrics.get("num_calls", 0))

    @property
    def num_sampled(self) -> int:
        """See `Transcript`."""
        return sum(int(np.count_nonzero(as_uint8(row.loss_mask))) for row in self._export.rows)

    @property
    def num_nonfinite(self) -> int:
        """See `Transcript`; the gateway counts them itself."""
        return 0

    @property
    def turn_rewards(self) -> tuple[float, ...]:
        """See `Transcript`; the rewards that the workflow gave."""
        return self._export.rewards

    def __len__(self) -> int:
        return sum(len(row.loss_mask) for row in self._export.rows)

    def messages(self) -> Sequence[ChatMessage]:
        """See `Transcript`."""
        return self._export.messages

    def counts(self) -> Mapping[str, float]:
        """See `Transcript`."""
        return self._export.metrics

    @property
    def faults(self) -> Sequence[str]:
        """See `Transcript`."""
        return (*self._export.refusals, *self._export.faults)

    @property
    def is_over_budget(self) -> bool:
        """True if a call was refused because of a used-up limit."""
        return bool(self._export.refusals)

    def rows(self, reward: float) -> tuple[TokenRow, ...]:
        """See `Transcript`. The part of `reward` that the workflow did not give is added to each row
        of a conversation that the workflow rewarded."""
        added = reward - sum(self.turn_rewards)
        replace = msgspec.structs.replace
        return tuple(
            replace(row, reward=row.reward + added) if added and row.has_reward else row
            for row in self._export.rows
        )


NO_TURNS = SessionTranscript()  # of an episode without a policy yet; it takes no export
