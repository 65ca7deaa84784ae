"""Journal of one episode in use: recorded answers first, new ones kept.

Invariants: a record is given out once. Model calls are found by all ids of their prompt, tool results
by name and arguments (by the call's id if several are alike), never by order alone, since parallel
calls end in any order. Only the turns of an environment, one after another, are found by their order.
"""

import hashlib
from collections.abc import Awaitable, Iterator, Sequence

from tailrace_agents.ports import EpisodeJournal
from tailrace_protos.base import Int32Bytes
from tailrace_protos.chat import ToolCall
from tailrace_protos.journal import CallRecord, EnvStep, JournalRecord, ToolRecord
from tailrace_protos.session import LedgerNode
from tailrace_protos.tool import ToolResult


class EpisodeRecords:
    """Records of one episode."""

    __slots__ = ("_calls", "_journal", "_next_index", "_tools", "_turns")

    def __init__(self, journal: EpisodeJournal, recorded: Sequence[JournalRecord] = ()) -> None:
        self._journal = journal
        self._calls: dict[bytes, list[CallRecord]] = {}
        self._tools: dict[tuple[str, str], list[ToolRecord]] = {}
        self._next_index = 0
        turns: list[CallRecord] = []
        for record in recorded:
            self._next_index = max(self._next_index, record.index + 1)
            if isinstance(record, ToolRecord):
                key = (record.call.name, record.call.arguments)
                self._tools.setdefault(key, []).append(record)
            elif record.step is not None:
                turns.append(record)
            else:
                self._calls.setdefault(record.prompt_digest, []).append(record)
        self._turns: Iterator[CallRecord] = iter(turns)  # of an environment

    def known_turn(self) -> CallRecord | None:
        """Returns the next recorded turn of an environment."""
        return next(self._turns, None)

    def known_call(self, prompt_ids: Int32Bytes) -> LedgerNode | None:
        """Returns the recorded answer to this prompt."""
        known = self._calls.get(_digest(prompt_ids))
        return known.pop(0).node if known else None

    def known_result(self, call: ToolCall) -> ToolRecord | None:
        """Returns the recorded result of this tool call."""
        known = self._tools.get((call.name, call.arguments))
        if not known:
            return None
        same = [index for index, record in enumerate(known) if record.call.id == call.id]
        return known.pop(same[0] if same else 0)

    def keep_turn(self, node: LedgerNode, step: EnvStep) -> Awaitable[None]:
        """Keeps a turn that an environment answered; raises `EpisodeTakenError`."""
        return self._journal.append(CallRecord(self._index(), node, b"", step))

    async def keep_call(self, prompt_ids: Int32Bytes, node: LedgerNode) -> None:
        """Keeps a model call durably; raises `EpisodeTakenError`."""
        await self._journal.append(CallRecord(self._index(), node, _digest(prompt_ids)))

    async def keep_result(self, call: ToolCall, result: ToolResult, is_stateful: bool) -> None:
        """Keeps a tool's result durably; raises `EpisodeTakenError`."""
        await self._journal.append(ToolRecord(self._index(), call, result, is_stateful))

    def _index(self) -> int:
        """Numbers a new record."""
        index = self._next_index
        self._next_index = index + 1
        return index


def _digest(prompt_ids: Int32Bytes) -> bytes:
    return hashlib.blake2b(prompt_ids, digest_size=16).digest()
