"""Tree of calls: each call continues a parent by its messages, and usually by its tokens too.

Invariants: a call's parent stands before it; a call that was rendered whole continues its parent's
messages but none of its tokens; nodes are only added, or replaced by a node with the same tokens.
"""

from collections.abc import Iterator, Sequence

import msgspec

from tailrace_protos.session import LedgerNode


class UnknownCompletionError(KeyError):
    """No recorded call has this id. Attributes: `completion_id`, `num_calls` (recorded ones)."""

    def __init__(self, completion_id: str, num_calls: int) -> None:
        super().__init__(completion_id)
        self.completion_id = completion_id
        self.num_calls = num_calls

    def __str__(self) -> str:
        name = f"call {self.completion_id!r}" if self.completion_id else "last call"
        return f"the ledger has no {name}: {self.num_calls} calls are recorded; use the id of one"


class Call(msgspec.Struct, eq=False, gc=False):  # a tree of calls has no reference cycle
    """A node with its place in the tree."""

    node: LedgerNode
    parent: "Call | None"
    _sequence: bytes | None = None  # kept for the newest call of a conversation only

    @property
    def token_parent(self) -> "Call | None":
        """Call whose tokens this call's begin with."""
        return None if self.node.is_rendered_whole else self.parent

    def message_path(self) -> "list[Call]":
        """Calls of the conversation, from its beginning to this one."""
        path: list[Call] = []
        call: Call | None = self
        while call is not None:
            path.append(call)
            call = call.parent
        return path[::-1]

    def token_path(self) -> "list[Call]":
        """Calls whose tokens stand in this one's sequence, in order."""
        path: list[Call] = []
        call: Call | None = self
        while call is not None:
            path.append(call)
            call = call.token_parent
        return path[::-1]

    def sequence(self) -> bytes:
        """Raw ids of the whole conversation, this call's reply included."""
        if self._sequence is None:
            node, parent = self.node, self.parent
            if node.is_rendered_whole:
                self._sequence = b"".join((node.inserted_ids, node.token_ids))
            elif parent is not None and parent._sequence is not None:
                before, parent._sequence = parent._sequence, None
                self._sequence = b"".join((before, node.inserted_ids, node.token_ids))
            else:
                nodes = (call.node for call in self.token_path())
                parts = (part for node in nodes for part in (node.inserted_ids, node.token_ids))
                self._sequence = b"".join(parts)
        return self._sequence

    def prompt(self) -> bytes:
        """Raw ids of the call's prompt."""
        sequence = self.sequence()
        return sequence[: len(sequence) - len(self.node.token_ids)]


class CallTree:
    """Calls in the order of their recording.

    Calls refer to their parents only: without reference cycles, a finished ledger is freed at once.
    """

    __slots__ = ("_calls", "_children", "num_sampled")

    def __init__(self) -> None:
        self.num_sampled = 0  # tokens of all calls
        self._calls: dict[str, Call] = {}
        self._children: dict[str, list[Call]] | None = None  # by the parent's id, once it is needed

    def __len__(self) -> int:
        return len(self._calls)

    def __iter__(self) -> Iterator[Call]:
        return iter(self._calls.values())

    def get(self, completion_id: str) -> Call | None:
        """Finds a call; None if it is not recorded."""
        return self._calls.get(completion_id)

    def children(self, call: Call | None) -> Sequence[Call]:
        """Calls that continue a call's messages; for None, those that begin a conversation."""
        if self._children is None:
            self._children = {}
            for each in self._calls.values():
                self._children.setdefault(each.node.parent_id, []).append(each)
        return self._children.get(call.node.completion_id if call else "", ())

    def is_token_leaf(self, call: Call) -> bool:
        """True if no other call's tokens begin with this one's."""
        return all(child.node.is_rendered_whole for child in self.children(call))

    def last_choices(self) -> list[Call]:
        """Replies to the last request, the first of them first; empty without calls."""
        found: list[Call] = []
        for call in reversed(self._calls.values()):
            found.append(call)
            if not call.node.choice:
                break
        return found[::-1]

    def find(self, completion_id: str) -> Call:
        """Finds a call; for an empty id the last one, of several choices the first.

        Raises `UnknownCompletionError`.
        """
        call = (
            self._calls.get(completion_id) if completion_id else next(iter(self.last_choices()), None)
        )
        if call is None:
            raise UnknownCompletionError(completion_id, len(self))
        return call

    def add(self, node: LedgerNode) -> Call:
        """Adds a call or updates a known one; raises `UnknownCompletionError` for an unknown parent."""
        calls, parent = self._calls, None
        completion_id, parent_id = node.completion_id, node.parent_id
        known = calls.get(completion_id)
        if known is not None:
            known.node = node
            return known
        if parent_id:
            parent = calls.get(parent_id) or self.find(parent_id)
        self.num_sampled += len(node.token_ids) // 4
        call = calls[completion_id] = Call(node, parent)
        if self._children is not None:
            self._children.setdefault(parent_id, []).append(call)
        return call
