"""A ledger as the books of an episode: its turns are model calls, its rows what the ledger exports."""

from __future__ import annotations

import math

from tailrace.ledger import Ledger
from tailrace_agents.core.tokens import CheckedRows
from tailrace_protos.session import ExportStyle


class LedgerBooks:
    """`EpisodeBooks` of an agent loop."""

    def __init__(self, ledger: Ledger, style: ExportStyle, turn_discount: float) -> None:
        self.ledger = ledger
        self._style = style
        self._turn_discount = turn_discount

    @property
    def num_turns(self) -> int:
        """See `EpisodeBooks`."""
        return len(self.ledger.nodes)

    @property
    def num_sampled(self) -> int:
        """See `EpisodeBooks`."""
        return self.ledger.num_sampled

    @property
    def turn_rewards(self) -> tuple[float, ...]:
        """See `EpisodeBooks`; a call without a reward was worth nothing by itself."""
        return tuple(node.reward or 0.0 for node in self.ledger.nodes)

    def __len__(self) -> int:
        parts = ((node.inserted_ids, node.token_ids) for node in self.ledger.nodes)
        return sum(len(inserted) + len(sampled) for inserted, sampled in parts) // 4

    def rows(self, reward: float) -> CheckedRows:
        """See `EpisodeBooks`. What the episode is worth beyond the rewards that its loop gave belongs
        to the newest call, so that the rewards of all calls add up to `reward`."""
        if not self.ledger.nodes:
            return CheckedRows((), 0)
        given = math.fsum(self.turn_rewards)
        if reward != given:
            last = self.ledger.nodes[-1].reward or 0.0
            self.ledger.set_reward(last + (reward - given))
        rows = self.ledger.rows(self._style, self._turn_discount)
        return CheckedRows(rows, int(self.ledger.counts().get("num_nonfinite_tokens", 0)))
