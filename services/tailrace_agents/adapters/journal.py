"""An episode's journal in Redis."""

from __future__ import annotations

from collections.abc import Sequence

from tailrace.policy.activity import Stages
from tailrace.store import AppendResult, Journal
from tailrace_agents.ports import EpisodeTakenError
from tailrace_protos.journal import JournalRecord


class StoredJournal:
    """`EpisodeJournal` of one attempt at one episode.

    `may_have_records`: nobody can have written to it before the first delivery of the first attempt, so
    that one need not ask.
    """

    def __init__(
        self, journal: Journal, episode_id: str, stages: Stages, may_have_records: bool
    ) -> None:
        self._journal = journal
        self._episode_id = episode_id
        self._stages = stages
        self.may_have_records = may_have_records

    async def load(self) -> Sequence[JournalRecord]:
        """See `EpisodeJournal`."""
        return await self._journal.load(self._episode_id) if self.may_have_records else ()

    async def append(self, record: JournalRecord) -> None:
        """See `EpisodeJournal`."""
        self._stages.num_settling += 1
        try:
            result = await self._journal.append(self._episode_id, record)
        finally:
            self._stages.num_settling -= 1
        if result is not AppendResult.APPENDED:
            raise EpisodeTakenError(self._episode_id, result.value)

    async def clear(self) -> None:
        """See `EpisodeJournal`."""
        await self._journal.clear(self._episode_id)
