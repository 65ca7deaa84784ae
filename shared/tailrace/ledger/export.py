"""Rows of a ledger: `individual` and `step` (one per call), `concat` (one per leaf of the token tree).

Exactly one row trains each call's tokens. In `concat` the first of the leaves that share a call trains
it; the others show it as context. A row of `concat` is credited the return of the first call that it
trains. Its turns keep their own rewards, and `turn_returns` holds the return of each turn's call. A row
of `individual` stands alone: its one turn has the call's return as its reward. Rows that train nothing
are left out.

`step` is `individual` with places: the calls of the last conversation are one line of turns. Each turn
has its own reward and is named by the ids inserted before it. Calls outside that line (sub-agents,
abandoned branches) stand alone, with their return.

Every row names its conversation and says if that conversation was given any reward
(`tailrace.ledger.returns`): a sub-agent's may have none, and then has no part in the rewards of others.
"""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from tailrace.ledger.returns import Conversation, CreditedCalls
from tailrace.ledger.row_builder import RowBuilder, has_trained_tokens
from tailrace.ledger.tree import Call, CallTree
from tailrace_protos.chat import ChatMessage
from tailrace_protos.session import ExportStyle
from tailrace_protos.trajectory import TokenRow


class Unanswered(NamedTuple):
    """Newest prompt of an episode that had no budget left for a reply."""

    messages: tuple[ChatMessage, ...]
    inserted_ids: bytes


def export_rows(tree: CallTree, style: ExportStyle, credit: CreditedCalls) -> tuple[TokenRow, ...]:
    """Exports the rows of all conversations, each in the order of the first trained calls.

    `row_id` is the id of the row's last call.
    """
    return tuple(_STYLES[style](tree, credit))


def _credited(credit: CreditedCalls, completion_id: str) -> dict[str, Any]:
    """Arguments of a row that is credited this call's return."""
    place, has_reward = credit.conversations[completion_id]
    return {
        "reward": credit.returns[completion_id],
        "conversation": place,
        "has_reward": has_reward,
    }


def export_turns(
    calls: Sequence[Call],
    style: ExportStyle,
    reward: float,
    rewards: Sequence[float],
    hashes: Sequence[int],
    unanswered: Unanswered | None,
) -> tuple[TokenRow, ...]:
    """Exports calls that are one line of turns: one row (`concat`), or a row for every turn (`step`).

    Rows are credited `reward`, the episode's; turns keep their own of `rewards` [K]. In `concat` each
    call continues the tokens of the one before it. A row of `step` shows its call's prompt as context.
    """
    if style is ExportStyle.STEP:
        return tuple(
            _turn_row(call, reward, place, rewards[place], hashes[place])
            for place, call in enumerate(calls)
        )
    row = RowBuilder()
    for call, own in zip(calls, rewards, strict=True):
        row.insert(call.node.inserted_ids)
        row.turn(call.node, own)
    if unanswered is not None:
        row.insert(unanswered.inserted_ids)
    return (row.row(reward, hashes=hashes),) if calls or unanswered is not None else ()


def _turn_row(call: Call, reward: float, place: int, own: float, observed: int) -> TokenRow:
    row = RowBuilder()
    row.insert(call.prompt())
    row.turn(call.node, own)
    return row.row(reward, str(place), hashes=(observed,), first_turn=place)


def _individual(tree: CallTree, credit: CreditedCalls) -> Iterator[TokenRow]:
    for call in tree:
        if has_trained_tokens(call.node):
            completion_id = call.node.completion_id
            row = RowBuilder()
            row.insert(call.prompt())
            row.turn(call.node, credit.returns[completion_id])
            yield row.row(row_id=completion_id, **_credited(credit, completion_id))


def _step(tree: CallTree, credit: CreditedCalls) -> Iterator[TokenRow]:
    line = tree.find("").message_path() if len(tree) else []
    places = {call.node.completion_id: place for place, call in enumerate(line)}
    for call in tree:
        if has_trained_tokens(call.node):
            completion_id = call.node.completion_id
            row = RowBuilder()
            row.insert(call.prompt())
            row.turn(call.node, credit.rewards[completion_id])
            yield row.row(
                row_id=completion_id,
                hashes=(observation_hash(call),),
                first_turn=places.get(completion_id, -1),
                **_credited(credit, completion_id),
            )


def observation_hash(call: Call) -> int:
    """Names the ids inserted before a call, salted with the first ids of its conversation."""
    task = bytes(call.message_path()[0].node.inserted_ids)
    salt = hashlib.blake2b(task, digest_size=16).digest()
    digest = hashlib.blake2b(bytes(call.node.inserted_ids), digest_size=8, key=salt).digest()
    return int.from_bytes(digest, "little", signed=True)


def _concat(tree: CallTree, credit: CreditedCalls) -> Iterator[TokenRow]:
    order = {call.node.completion_id: index for index, call in enumerate(tree)}
    found: dict[Conversation, list[tuple[str, TokenRow]]] = {}
    for first, row in _paths(tree, credit):
        found.setdefault(credit.conversations[first], []).append((first, row))
    for rows in found.values():
        yield from (row for _, row in sorted(rows, key=lambda pair: order[pair[0]]))


def _paths(tree: CallTree, credit: CreditedCalls) -> Iterator[tuple[str, TokenRow]]:
    """Yields a row for every leaf that trains something, after the id of the first call it trains."""
    trained: set[str] = set()
    for leaf in filter(tree.is_token_leaf, tree):
        row, first = RowBuilder(), ""
        for call in leaf.token_path():
            completion_id = call.node.completion_id
            row.insert(call.node.inserted_ids)
            if completion_id in trained:
                row.insert(call.node.token_ids)
            else:
                row.turn(call.node, credit.rewards[completion_id], credit.returns[completion_id])
                if not first and has_trained_tokens(call.node):
                    first = completion_id
                trained.add(completion_id)
        if first:
            yield first, row.row(row_id=leaf.node.completion_id, **_credited(credit, first))


_STYLES: dict[ExportStyle, Callable[[CallTree, CreditedCalls], Iterator[TokenRow]]] = {
    ExportStyle.INDIVIDUAL: _individual,
    ExportStyle.CONCAT: _concat,
    ExportStyle.STEP: _step,
}
