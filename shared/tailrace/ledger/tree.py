"""The tree of calls: who continues whom, by messages and by tokens.

Invariants: a call's parent stands before it; a call that was rendered whole continues its parent's
messages but none of its tokens; nodes are only ever added, or replaced by one of the same tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from tailrace.ledger.errors import UnknownCompletionError
from tailrace_protos.session import LedgerNode


@dataclass(slots=True, eq=False)
class Call:
    """A node with its place in the tree."""

    node: LedgerNode
    parent: Call | None
    num_tokens: int  # of the whole conversation, this call's reply included
    children: list[Call] = field(default_factory=list)

    @property
    def token_parent(self) -> Call | None:
        """The call whose tokens this one's begin with."""
        return None if self.node.is_rendered_whole else self.parent

    @property
    def is_token_leaf(self) -> bool:
        """Whether no other call's tokens begin with this one's."""
        return all(child.node.is_rendered_whole for child in self.children)

    def message_path(self) -> list[Call]:
        """The calls of the conversation, from its beginning to this one."""
        path: list[Call] = []
        call: Call | None = self
        while call is not None:
            path.append(call)
            call = call.parent
        return path[::-1]

    def token_path(self) -> list[Call]:
        """The calls whose tokens stand in this one's sequence, in order."""
        path: list[Call] = []
        call: Call | None = self
        while call is not None:
            path.append(call)
            call = call.token_parent
        return path[::-1]

    def sequence(self) -> bytes:
        """Raw ids of the whole conversation, its reply included."""
        parts: list[bytes | memoryview] = []
        for call in self.token_path():
            parts += (call.node.inserted_ids, call.node.token_ids)
        return b"".join(parts)


class CallTree:
    """All calls in the order of their recording."""

    def __init__(self) -> None:
        self.roots: list[Call] = []
        self._calls: dict[str, Call] = {}

    def __len__(self) -> int:
        return len(self._calls)

    def __iter__(self) -> Iterator[Call]:
        return iter(self._calls.values())

    def __contains__(self, completion_id: object) -> bool:
        return completion_id in self._calls

    def find(self, completion_id: str) -> Call:
        """The call, the last one for an empty id; raises `UnknownCompletionError`."""
        if not completion_id and self._calls:
            completion_id = next(reversed(self._calls))
        call = self._calls.get(completion_id)
        if call is None:
            raise UnknownCompletionError(completion_id, len(self))
        return call

    def add(self, node: LedgerNode) -> Call:
        """Add a call, or update one that is there; raises `UnknownCompletionError` for its parent."""
        known = self._calls.get(node.completion_id)
        if known is not None:
            known.node = node
            return known
        parent = self.find(node.parent_id) if node.parent_id else None
        before = parent.num_tokens if parent and not node.is_rendered_whole else 0
        num_tokens = before + (len(node.inserted_ids) + len(node.token_ids)) // 4
        call = Call(node, parent, num_tokens)
        (parent.children if parent else self.roots).append(call)
        self._calls[node.completion_id] = call
        return call
