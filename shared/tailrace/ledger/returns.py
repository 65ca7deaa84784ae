"""Credit of calls: own rewards, returns, and the conversations that a reward reaches.

    R_i = r_i + γ · mean of the returns of the calls that continue call i

Returns follow the message tree, not the order of recording. Rewards of single calls (by id) stay in
their conversation: a sub-agent's is a tree of its own.

A reward of the episode is the last call's, beside what this call was given by id. `RewardScope` says
which calls it reaches:

- `last`: the last call with all its choices, and the calls that it continues;
- `conversation`: every call of the last call's tree, because each of its leaves ends with it;
- `episode`: every call of every tree. Trees follow each other in time: the leaves of a tree end with
  γ times what of the episode's reward the call has that was made after the tree's newest call.

A leaf that was given a reward by id keeps that and is not reached. A reply that the gateway sampled
again does not count as a continuation of its parent. All trees that the episode's reward reaches are
one conversation for comparisons: they have one outcome.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from tailrace.ledger.tree import Call, CallTree
from tailrace_protos.session import RewardScope


class Conversation(NamedTuple):
    """Message tree (all calls that descend from one first call), or trees of one reward."""

    place: int  # in the order in which they began
    has_reward: bool  # any of its calls was given one, even 0


class CreditedCalls(NamedTuple):
    """Values by completion id. `rewards`: each call's own, with the episode's at the last call."""

    rewards: Mapping[str, float]
    returns: Mapping[str, float]
    conversations: Mapping[str, Conversation]


def credit(
    tree: CallTree, turn_discount: float, reward: float | None, scope: RewardScope
) -> CreditedCalls:
    """Credits all calls; `reward` is the episode's, None without one."""
    calls = list(tree)
    places = _places(calls)
    given = {places[call.node.completion_id] for call in calls if call.node.reward is not None}
    rewards = {call.node.completion_id: call.node.reward or 0.0 for call in calls}
    values, joined = {**rewards}, set[int]()
    if reward is not None and calls:
        last = tree.find("").node.completion_id
        rewards[last] += reward
        reached = _reached(tree, places, _ends(tree, places, turn_discount, reward, scope), scope)
        values = {**rewards, **reached}
        joined = {places[name] for name in (last, *reached)}
    for call in reversed(calls):  # children stand behind their parents
        if followers := _followers(tree, call):
            values[call.node.completion_id] += turn_discount * _mean(followers, values)
    return CreditedCalls(rewards, values, _conversations(places, given, joined))


def _conversations(
    places: Mapping[str, int], given: set[int], joined: set[int]
) -> dict[str, Conversation]:
    """Maps each call to its conversation; the trees `joined` by one reward are one."""
    return {
        name: Conversation(min(joined) if place in joined else place, place in given | joined)
        for name, place in places.items()
    }


def _places(calls: Sequence[Call]) -> dict[str, int]:
    """Maps each call to the place of its tree, in the order in which trees began."""
    places: dict[str, int] = {}
    num_begun = 0
    for call in calls:  # parents stand before their children
        if call.parent is None:
            places[call.node.completion_id], num_begun = num_begun, num_begun + 1
        else:
            places[call.node.completion_id] = places[call.parent.node.completion_id]
    return places


def _ends(
    tree: CallTree, places: Mapping[str, int], turn_discount: float, reward: float, scope: RewardScope
) -> dict[int, float]:
    """Maps the place of each tree that the episode's reward reaches to the value at its leaves."""
    ends = dict.fromkeys((places[call.node.completion_id] for call in tree.last_choices()), reward)
    if scope is not RewardScope.EPISODE:
        return ends
    calls = list(tree)
    last_places = set(ends)
    by_place: dict[int, list[int]] = {}
    for index, call in enumerate(calls):
        by_place.setdefault(places[call.node.completion_id], []).append(index)
    shares: dict[str, float] = {}  # of the reward, whatever calls were given by id
    for place, indices in sorted(by_place.items(), key=lambda pair: -pair[1][-1]):
        if place not in last_places:
            ends[place] = turn_discount * shares[calls[indices[-1] + 1].node.completion_id]
        for call in (calls[index] for index in reversed(indices)):
            followers = _followers(tree, call)
            share = turn_discount * _mean(followers, shares) if followers else ends[place]
            shares[call.node.completion_id] = share
    return ends


def _reached(
    tree: CallTree, places: Mapping[str, int], ends: Mapping[int, float], scope: RewardScope
) -> dict[str, float]:
    """Values of the leaves without a reward of their own that the episode's reward reaches, beside the
    last call."""
    last, *choices = tree.last_choices()
    found = {}
    for call in choices if scope is RewardScope.LAST else tree:
        name = call.node.completion_id
        is_free = call is not last and call.node.reward is None and not tree.children(call)
        if is_free and places[name] in ends:
            found[name] = ends[places[name]]
    return found


def _followers(tree: CallTree, call: Call) -> Sequence[Call]:
    """Calls that continue a call, without replies that were sampled again."""
    children = tree.children(call)
    return [child for child in children if not is_rejected(tree, child)] or children


def is_rejected(tree: CallTree, call: Call) -> bool:
    """True for a reply that broke a constraint, was given a reward for it, and was not continued."""
    node = call.node
    return bool(node.broken_constraint) and node.reward is not None and not tree.children(call)


def _mean(followers: Sequence[Call], values: Mapping[str, float]) -> float:
    return sum(values[each.node.completion_id] for each in followers) / len(followers)
