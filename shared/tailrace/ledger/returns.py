"""Returns of calls: R_i = r_i + γ · mean of the returns of the calls that continue call i.

Returns follow the message tree, not the order of recording: a sub-agent's conversation is a tree of its
own and gets nothing of the main agent's rewards. A call without a reward of its own counts 0.
"""

from collections.abc import Sequence
from typing import NamedTuple

from tailrace.ledger.tree import Call, CallTree


class Conversation(NamedTuple):
    """Message tree: all calls that descend from one first call."""

    place: int  # in the order in which they began
    has_reward: bool  # any of its calls was given a reward, even 0


def conversations(tree: CallTree) -> dict[str, Conversation]:
    """Maps each completion id to its conversation."""
    places: dict[str, int] = {}
    num_begun = 0
    for call in tree:  # parents stand before their children
        if call.parent is None:
            places[call.node.completion_id], num_begun = num_begun, num_begun + 1
        else:
            places[call.node.completion_id] = places[call.parent.node.completion_id]
    rewarded = {places[call.node.completion_id] for call in tree if call.node.reward is not None}
    return {name: Conversation(place, place in rewarded) for name, place in places.items()}


def returns(tree: CallTree, turn_discount: float) -> dict[str, float]:
    """Maps each completion id to its call's return."""
    found: dict[str, float] = {}
    for call in reversed(list(tree)):  # children stand behind their parents
        found[call.node.completion_id] = own_reward(call) + turn_discount * _mean(
            tree.children(call), found
        )
    return found


def own_reward(call: Call) -> float:
    """Reward of the call itself, 0 if none was set."""
    return call.node.reward or 0.0


def _mean(children: Sequence[Call], found: dict[str, float]) -> float:
    if not children:
        return 0.0
    return sum(found[child.node.completion_id] for child in children) / len(children)
