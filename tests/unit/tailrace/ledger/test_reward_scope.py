"""Calls that a reward of the episode reaches: by scope, discount, forks, and rewards by id."""

from __future__ import annotations

import pytest
from msgspec import structs

from tailrace.ledger import Ledger
from tailrace_protos.base import as_float32
from tailrace_protos.generation import FinishReason
from tailrace_protos.session import ExportStyle, LedgerNode, RewardScope
from tests.unit.tailrace.ledger.calls import ledger_of, node

EPISODE, CONVERSATION, LAST = RewardScope
ONE, CONCAT, STEP = ExportStyle.INDIVIDUAL, ExportStyle.CONCAT, ExportStyle.STEP


def rewarded(reward: float, *nodes: LedgerNode) -> Ledger:
    ledger = ledger_of(*nodes)
    ledger.reward = reward
    return ledger


def credited(ledger: Ledger, scope: RewardScope, discount: float = 1.0) -> dict[str, float]:
    """Return of every call whose conversation has a reward."""
    rows = ledger.rows(ONE, discount, scope)
    return {row.row_id: row.reward for row in rows if row.has_reward}


def rewritten() -> Ledger:
    """Every call is a conversation of its own: a framework that renders its history anew."""
    return rewarded(1.0, *(node(name, "", [1], [2]) for name in "abc"))


def teams() -> Ledger:
    """
    m1 ------------ m2 -- m3     the main agent; it calls s, then t
        s1 -- s2        t1       m2 is followed by a branch x that was given up
    """
    return rewarded(
        1.0,
        node("m1", "", [1], [2]),
        node("s1", "", [1], [3]),
        node("s2", "s1", [1], [4]),
        node("m2", "m1", [1], [5]),
        node("x", "m2", [1], [6]),
        node("t1", "", [1], [7]),
        node("m3", "m2", [1], [8]),
    )


@pytest.mark.parametrize(
    ("scope", "expected"),
    [
        (EPISODE, {"a": 0.25, "b": 0.5, "c": 1.0}),
        (CONVERSATION, {"c": 1.0}),
        (LAST, {"c": 1.0}),
    ],
)
def test_conversations_follow_each_other_in_time(
    scope: RewardScope, expected: dict[str, float]
) -> None:
    assert credited(rewritten(), scope, 0.5) == expected
    assert set(credited(rewritten(), scope).values()) == {1.0}


def test_a_call_is_discounted_by_its_tree_and_by_what_followed_its_tree() -> None:
    expected = {
        "m3": 1.0,
        "x": 1.0,  # ends the same conversation
        "m2": 0.5,
        "m1": 0.25,
        "t1": 0.5,  # m3 followed
        "s2": 0.25,  # m2 followed
        "s1": 0.125,
    }
    assert credited(teams(), EPISODE, 0.5) == expected
    assert set(credited(teams(), EPISODE).values()) == {1.0}


def test_smaller_scopes_are_the_tree_of_the_last_call_and_its_own_line() -> None:
    assert credited(teams(), CONVERSATION) == dict.fromkeys(("m1", "m2", "m3", "x"), 1.0)
    assert credited(teams(), LAST) == {"m1": 0.5, "m2": 0.5, "x": 0.0, "m3": 1.0}


@pytest.mark.parametrize("style", [ONE, CONCAT, STEP])
def test_all_that_the_reward_reaches_is_compared_as_one_outcome(style: ExportStyle) -> None:
    assert {(row.conversation, row.has_reward) for row in teams().rows(style)} == {(0, True)}
    rows = teams().rows(style, 1.0, LAST)
    assert {(row.conversation, row.has_reward) for row in rows} == {(0, True), (1, False), (2, False)}


def test_rows_of_conversations_have_the_returns_of_their_calls() -> None:
    rows = {row.row_id: row for row in teams().rows(CONCAT, 0.5)}
    assert as_float32(rows["s2"].turn_returns).tolist() == [0.125, 0.25]
    assert as_float32(rows["s2"].turn_rewards).tolist() == [0.0, 0.0]
    given = [value for row in rows.values() for value in as_float32(row.turn_rewards).tolist()]
    assert sum(given) == 1.0  # the reward itself stands once


def test_calls_with_a_reward_by_id_keep_their_own() -> None:
    ledger = rewarded(
        1.0,
        node("a", "", [1], [2], 0.25),
        node("b", "", [1], [3]),
        node("c", "", [1], [4], 0.5),
        node("d", "c", [1], [5]),
    )
    assert credited(ledger, EPISODE) == {"a": 0.25, "b": 1.0, "c": 1.5, "d": 1.0}
    assert ledger.rewards == (0.25, None, 0.5, 1.0)
    places = {row.row_id: row.conversation for row in ledger.rows(ONE)}
    assert places == {"a": 0, "b": 1, "c": 1, "d": 1}


def test_rewards_by_id_alone_stay_in_their_conversations() -> None:
    ledger = ledger_of(
        node("a", "", [1], [2], 0.25), node("b", "", [1], [3]), node("c", "b", [1], [4], 1.0)
    )
    for scope in RewardScope:
        assert credited(ledger, scope, 0.5) == {"a": 0.25, "b": 0.5, "c": 1.0}


def test_a_reply_that_was_sampled_again_takes_no_share_of_its_parents_return() -> None:
    ledger = rewarded(
        1.0,
        node("a", "", [1], [2]),
        node("b-again0", "a", [1], [3], 0.0, broken_constraint="tool_choice"),
        node("b", "a", [1], [4]),
    )
    assert credited(ledger, EPISODE) == {"a": 1.0, "b-again0": 0.0, "b": 1.0}


def test_the_reward_of_a_repeated_export_is_the_same() -> None:
    ledger = teams()
    assert ledger.rows(CONCAT, 0.5) == ledger.rows(CONCAT, 0.5)


def test_faults_are_those_of_replies_that_nothing_continued() -> None:
    cut = FinishReason.LENGTH
    ledger = ledger_of(node("a", "", [1], [2], finish_reason=cut), node("b", "a", [1], [3]))
    assert ledger.faults == ()
    ledger.add(node("c", "", [1], [4], finish_reason=cut))
    ledger.add(node("d", "b", [1], [4], num_malformed=1, broken_constraint="response_format"))
    assert ledger.faults == ("malformed_tool_call", "reply_cut", "response_format_not_met")


CHOICES = (
    node("c", "a", [1], [3]),
    node("c-1", "a", [1], [4], choice=1),
    node("c-2-again0", "a", [1], [5], 0.0, choice=2, broken_constraint="tool_choice"),
    node("c-2", "a", [1], [6], choice=2),
)


@pytest.mark.parametrize("scope", RewardScope)
@pytest.mark.parametrize("parent", ["a", ""])
def test_all_choices_of_the_last_call_have_its_reward(scope: RewardScope, parent: str) -> None:
    choices = [structs.replace(each, parent_id=parent) for each in CHOICES]
    ledger = rewarded(1.0, node("a", "", [1], [2]), *choices)
    found = credited(ledger, scope, 0.5)
    own = {name: found[name] for name in ("c", "c-1", "c-2")}
    assert own == {"c": 1.0, "c-1": 1.0, "c-2": 1.0}
    assert found.get("a") == (0.5 if parent or scope is EPISODE else None)
    assert found.get("c-2-again0", 0.0) == 0.0


def test_the_last_call_is_the_first_of_its_choices() -> None:
    ledger = rewarded(1.0, node("a", "", [1], [2]), *CHOICES)
    assert ledger.last_call_id == "c"
    assert ledger.messages()[-1] == ledger.messages("c")[-1]
    assert ledger.rewards == (None, 1.0, None, 0.0, None)
    assert ledger.set_reward(2.0).completion_id == "c"
    places = {row.row_id: row.first_turn for row in ledger.rows(STEP)}
    assert places == {"a": 0, "c": 1, "c-1": -1, "c-2-again0": -1, "c-2": -1}
