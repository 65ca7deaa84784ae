"""What each call was worth: R_i = r_i + γ · mean of the returns of the calls that continue it.

Along the message tree, not along the order of recording: a sub-agent's conversation is a tree of its
own and gets nothing of the main agent's rewards. Calls without a reward of their own count 0.
"""

from __future__ import annotations

from tailrace.ledger.tree import Call, CallTree


def returns(tree: CallTree, turn_discount: float) -> dict[str, float]:
    """The return of every call by its completion id."""
    found: dict[str, float] = {}
    for call in reversed(list(tree)):  # children stand behind their parents
        found[call.node.completion_id] = own_reward(call) + turn_discount * _mean(call, found)
    return found


def own_reward(call: Call) -> float:
    """The reward set for the call itself, 0 if none is."""
    return call.node.reward or 0.0


def _mean(call: Call, found: dict[str, float]) -> float:
    if not call.children:
        return 0.0
    return sum(found[child.node.completion_id] for child in call.children) / len(call.children)
