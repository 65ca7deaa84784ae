"""Journal of a running episode: model calls and tool results that must not be made a second time.

`index` is the record's place in the journal, which is the order in which calls ended. Records of an
older Tailrace are refused by name (`OldRecordError`): an episode that has one begins again.
"""

from typing import Any, cast

import msgspec

from tailrace_protos.base import Count, Finite, MalformedMessageError, Message, decode
from tailrace_protos.chat import ToolCall
from tailrace_protos.session import LedgerNode
from tailrace_protos.tool import ToolResult


class EnvStep(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Answer of an environment to a reply, without its observation."""

    reward: Finite
    terminated: bool
    truncated: bool


class CallRecord(Message, frozen=True, tag="call_record", omit_defaults=True, gc=False):
    """A finished model call. A resumed loop that asks with the same prompt gets it.

    Calls of an environment are found by their order and have a `step`: a replay checks that the
    environment answers as it did, and that it shows the same `inserted_ids`.
    """

    index: Count
    node: LedgerNode
    prompt_digest: bytes = b""  # of all ids that the engine saw; empty with a `step`
    step: EnvStep | None = None


class ToolRecord(Message, frozen=True, tag="tool_record"):
    """A finished tool call. A resumed loop that makes the same call gets this result."""

    index: Count
    call: ToolCall
    result: ToolResult
    is_stateful: bool = False  # the tool keeps an object for the episode


JournalRecord = CallRecord | ToolRecord


class OldRecordError(MalformedMessageError):
    """A journal record of an older Tailrace. Attributes: `kind` (its tag), and those of its base."""

    def __init__(self, kind: str, error: MalformedMessageError) -> None:
        super().__init__(error.expected, error.num_bytes, f"{kind}: {error.reason}")
        self.kind = kind


class _Tagged(msgspec.Struct):
    """Tag of any message."""

    type: str


def decode_record(data: bytes) -> JournalRecord:
    """Decodes a record of any kind.

    Raises `OldRecordError` for a record that has another form, `MalformedMessageError` for other bytes.
    """
    try:
        record: JournalRecord = decode(data, cast(Any, JournalRecord))
    except MalformedMessageError as error:
        kind = decode(data, cast(Any, _Tagged)).type
        raise OldRecordError(kind, error) from error
    return record
