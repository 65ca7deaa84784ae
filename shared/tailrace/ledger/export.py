"""A ledger's rows: `individual` and `step` (one per call) or `concat` (one per leaf of the token tree).

Every call's tokens are trained by exactly one row. In `concat` a call that several leaves share is
trained by the first of them; the others show it as context. A row of `concat` is credited the return
of the first call that it trains; its turns keep their own rewards in their places, and beside them
stands what each is worth, which is the call's return. A row of `individual` stands for itself: its one
turn is worth the call's return. Rows that train nothing are left out.

`step` is `individual` with places: the calls of the last conversation are one line of turns, each turn
worth its own reward and named by what was inserted before it. Calls beside that line (sub-agents,
abandoned branches) stand for themselves, worth their return.

Every row names its conversation, and says whether that was given any reward: a sub-agent's may have
none, and then has no part in what others earned.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator

import msgspec

from tailrace.ledger.returns import Conversation, conversations, own_reward, returns
from tailrace.ledger.row_builder import RowBuilder
from tailrace.ledger.tree import Call, CallTree
from tailrace_protos.base import pack_int64
from tailrace_protos.session import ExportStyle
from tailrace_protos.trajectory import TokenRow

_Worth = dict[str, float]  # completion id -> return
_Homes = dict[str, Conversation]  # completion id -> where it belongs


def export_rows(tree: CallTree, style: ExportStyle, turn_discount: float) -> tuple[TokenRow, ...]:
    """The rows, those of a conversation in the order of their first trained call; `row_id` is the last
    call's id."""
    return tuple(_STYLES[style](tree, returns(tree, turn_discount), conversations(tree)))


def _individual(tree: CallTree, worth: _Worth, homes: _Homes) -> Iterator[TokenRow]:
    for call in tree:
        row = RowBuilder()
        *before, last = call.token_path()
        for earlier in before:
            row.context(earlier)
        completion_id = last.node.completion_id
        row.turn(last, worth[completion_id])
        if row.has_trained_tokens:
            yield row.row(completion_id, worth[completion_id], homes[completion_id])


def _step(tree: CallTree, worth: _Worth, homes: _Homes) -> Iterator[TokenRow]:
    line = tree.find("").message_path() if len(tree) else []
    places = {call.node.completion_id: place for place, call in enumerate(line)}
    for call in tree:
        row = RowBuilder()
        *before, last = call.token_path()
        for earlier in before:
            row.context(earlier)
        completion_id = last.node.completion_id
        row.turn(last, own_reward(last))
        if row.has_trained_tokens:
            yield msgspec.structs.replace(
                row.row(completion_id, worth[completion_id], homes[completion_id]),
                first_turn=places.get(completion_id, -1),
                turn_hashes=pack_int64([observation_hash(call)]),
            )


def observation_hash(call: Call) -> int:
    """Names what was inserted before a call, salted with what its conversation began with."""
    task = bytes(call.message_path()[0].node.inserted_ids)
    salt = hashlib.blake2b(task, digest_size=16).digest()
    digest = hashlib.blake2b(bytes(call.node.inserted_ids), digest_size=8, key=salt).digest()
    return int.from_bytes(digest, "little", signed=True)


def _concat(tree: CallTree, worth: _Worth, homes: _Homes) -> Iterator[TokenRow]:
    order = {call.node.completion_id: index for index, call in enumerate(tree)}
    found: dict[Conversation, list[tuple[str, TokenRow]]] = {}
    for first, row in _paths(tree, worth, homes):
        found.setdefault(homes[first], []).append((first, row))
    for rows in found.values():
        yield from (row for _, row in sorted(rows, key=lambda pair: order[pair[0]]))


def _paths(tree: CallTree, worth: _Worth, homes: _Homes) -> Iterator[tuple[str, TokenRow]]:
    """A row for every leaf that trains something, after the id of the first call that it trains."""
    trained: set[str] = set()
    for leaf in (call for call in tree if call.is_token_leaf):
        row, first = RowBuilder(), ""
        for call in leaf.token_path():
            completion_id = call.node.completion_id
            if completion_id in trained:
                row.context(call)
            else:
                row.turn(call, own_reward(call), worth[completion_id])
                first = first or (completion_id if row.has_trained_tokens else "")
                trained.add(completion_id)
        if row.has_trained_tokens:
            yield first, row.row(leaf.node.completion_id, worth[first], homes[first])


_STYLES: dict[ExportStyle, Callable[[CallTree, _Worth, _Homes], Iterator[TokenRow]]] = {
    ExportStyle.INDIVIDUAL: _individual,
    ExportStyle.CONCAT: _concat,
    ExportStyle.STEP: _step,
}
