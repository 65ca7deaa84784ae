"""The journal of a running episode: what must not be sampled or done a second time.

Environments keep turns (`TurnRecord`), agent loops keep model calls and tool results. `index` is the
record's place in the journal, which is the order in which things ended.
"""

from __future__ import annotations

from typing import Any, cast

from tailrace_protos.base import Message, decode
from tailrace_protos.chat import ToolCall
from tailrace_protos.episode import TurnRecord
from tailrace_protos.session import LedgerNode
from tailrace_protos.tool import ToolResult


class CallRecord(Message, frozen=True, tag="call_record"):
    """A finished model call of an agent loop; a resumed loop that asks with the same prompt gets it."""

    index: int
    prompt_digest: bytes  # of all ids that the engine saw
    node: LedgerNode


class ToolRecord(Message, frozen=True, tag="tool_record"):
    """A finished tool call; a resumed loop that makes the same call gets this result."""

    index: int
    call: ToolCall
    result: ToolResult
    is_stateful: bool = False  # the tool keeps an object for the episode


JournalRecord = TurnRecord | CallRecord | ToolRecord


def record_index(record: JournalRecord) -> int:
    """The record's place in its journal."""
    return record.turn if isinstance(record, TurnRecord) else record.index


def decode_record(data: bytes) -> JournalRecord:
    """A record of any kind; raises `MalformedMessageError`."""
    record: JournalRecord = decode(data, cast(Any, JournalRecord))
    return record
