"""A ledger as the books of an episode: its turns are model calls, its rows what the ledger exports."""

from __future__ import annotations

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
        """See `EpisodeBooks`. The rewards of all calls are made to add up to `reward`."""
        if not self.ledger.nodes:
            return CheckedRows((), 0)
        self.ledger.settle(reward)
        rows = self.ledger.rows(self._style, self._turn_discount)
        return CheckedRows(rows, int(self.ledger.counts().get("num_nonfinite_tokens", 0)))
