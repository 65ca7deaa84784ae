"""A ledger's rows: `individual` (one per call) or `concat` (one per leaf of the token tree).

Every call's tokens are trained by exactly one row. In `concat` a call that several leaves share is
trained by the first of them; the others show it as context. A row of `concat` is credited the return
of the first call that it trains; its turns keep their own rewards in their places. A row of
`individual` stands for itself: its one turn is worth the call's return. Rows that train nothing are
left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from tailrace.ledger.returns import own_reward, returns
from tailrace.ledger.row_builder import RowBuilder
from tailrace.ledger.tree import CallTree
from tailrace_protos.session import ExportStyle
from tailrace_protos.trajectory import TokenRow


def export_rows(tree: CallTree, style: ExportStyle, turn_discount: float) -> tuple[TokenRow, ...]:
    """The rows in the order of their first trained call; `row_id` is the last call's id."""
    return tuple(_STYLES[style](tree, returns(tree, turn_discount)))


def _individual(tree: CallTree, worth: dict[str, float]) -> Iterator[TokenRow]:
    for call in tree:
        row = RowBuilder()
        *before, last = call.token_path()
        for earlier in before:
            row.context(earlier)
        completion_id = last.node.completion_id
        row.turn(last, worth[completion_id])
        if row.has_trained_tokens:
            yield row.row(completion_id, worth[completion_id])


def _concat(tree: CallTree, worth: dict[str, float]) -> Iterator[TokenRow]:
    trained: set[str] = set()
    for leaf in (call for call in tree if call.is_token_leaf):
        row, first = RowBuilder(), ""
        for call in leaf.token_path():
            completion_id = call.node.completion_id
            if completion_id in trained:
                row.context(call)
            else:
                row.turn(call, own_reward(call))
                first = first or completion_id
                trained.add(completion_id)
        if row.has_trained_tokens:
            yield row.row(leaf.node.completion_id, worth[first])


_STYLES: dict[ExportStyle, Callable[[CallTree, dict[str, float]], Iterator[TokenRow]]] = {
    ExportStyle.INDIVIDUAL: _individual,
    ExportStyle.CONCAT: _concat,
}
