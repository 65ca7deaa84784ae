"""Rows and returns of trees written out by hand."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest

from tailrace.ledger import Ledger
from tailrace_protos.base import as_float32, as_int32, as_int64, as_uint8
from tailrace_protos.generation import TokenSpan
from tailrace_protos.session import ExportStyle
from tailrace_protos.trajectory import TokenRow
from tests.provenance import versions_of
from tests.unit.tailrace.ledger.calls import ledger_of, node

INDIVIDUAL, CONCAT = ExportStyle.INDIVIDUAL, ExportStyle.CONCAT


def check(
    row: TokenRow,
    *,
    row_id: str,
    ids: Sequence[int],
    mask: Sequence[int],
    turns: Sequence[tuple[int, float]],
    reward: float,
) -> None:
    """All of a row, for nodes with log-probabilities -id/10 and version 0."""
    assert row.row_id == row_id
    assert as_int32(row.token_ids).tolist() == list(ids)
    assert as_uint8(row.loss_mask).tolist() == list(mask)
    logprobs = [-token / 10 if trained else 0.0 for token, trained in zip(ids, mask, strict=True)]
    assert as_float32(row.inference_logprobs).tolist() == pytest.approx(logprobs)
    assert versions_of(row.spans) == [0] * sum(mask)
    ends, rewards = as_int32(row.turn_ends).tolist(), as_float32(row.turn_rewards).tolist()
    assert ends == [end for end, _ in turns]
    assert rewards == pytest.approx([worth for _, worth in turns])
    assert row.reward == pytest.approx(reward)


def branching() -> Ledger:
    """
    a (r 1) ── b (r 0) ── c (r 4)
            └─ d (r 2)
    """
    return ledger_of(
        node("a", "", [1, 2], [3], 1.0),
        node("b", "a", [4], [5, 6]),
        node("c", "b", [7], [8], 4.0),
        node("d", "a", [9], [10], 2.0),
    )


def test_returns_are_discounted_along_the_tree_and_averaged_where_it_branches() -> None:
    # γ 0.5: R_c 4, R_b 0 + 0.5*4 = 2, R_d 2, R_a 1 + 0.5*(2 + 2)/2 = 2
    rows = branching().rows(INDIVIDUAL, 0.5)
    assert [(row.row_id, row.reward) for row in rows] == [
        ("a", 2.0),
        ("b", 2.0),
        ("c", 4.0),
        ("d", 2.0),
    ]
    # γ 1: R_b 4, R_a 1 + (4 + 2)/2 = 4
    assert [row.reward for row in branching().rows(INDIVIDUAL, 1.0)] == [4.0, 4.0, 4.0, 2.0]
    assert [row.reward for row in branching().rows(INDIVIDUAL, 0.0)] == [1.0, 0.0, 4.0, 2.0]


def test_an_individual_row_is_one_call_with_all_before_it_as_context() -> None:
    a, b, c, d = branching().rows(INDIVIDUAL, 0.5)
    check(a, row_id="a", ids=[1, 2, 3], mask=[0, 0, 1], turns=[(3, 2.0)], reward=2.0)
    check(b, row_id="b", ids=[1, 2, 3, 4, 5, 6], mask=[0, 0, 0, 0, 1, 1], turns=[(6, 2.0)], reward=2.0)
    check(
        c,
        row_id="c",
        ids=[1, 2, 3, 4, 5, 6, 7, 8],
        mask=[0, 0, 0, 0, 0, 0, 0, 1],
        turns=[(8, 4.0)],
        reward=4.0,
    )
    check(d, row_id="d", ids=[1, 2, 3, 9, 10], mask=[0, 0, 0, 0, 1], turns=[(5, 2.0)], reward=2.0)


def test_a_concat_row_is_a_leaf_and_shared_calls_are_trained_in_the_first_one() -> None:
    first, second = branching().rows(CONCAT, 0.5)
    check(
        first,
        row_id="c",
        ids=[1, 2, 3, 4, 5, 6, 7, 8],
        mask=[0, 0, 1, 0, 1, 1, 0, 1],
        turns=[(3, 1.0), (6, 0.0), (8, 4.0)],
        reward=2.0,
    )
    check(second, row_id="d", ids=[1, 2, 3, 9, 10], mask=[0, 0, 0, 0, 1], turns=[(5, 2.0)], reward=2.0)


@pytest.mark.parametrize("style", [INDIVIDUAL, CONCAT])
def test_every_sampled_token_is_trained_by_one_row(style: ExportStyle) -> None:
    trained = [
        int(token)
        for row in branching().rows(style, 1.0)
        for token in as_int32(row.token_ids)[as_uint8(row.loss_mask) != 0]
    ]
    assert sorted(trained) == [3, 5, 6, 8, 10]


def test_samples_of_one_prompt_are_siblings() -> None:
    # three answers to one question, the second of them continued
    ledger = ledger_of(
        node("a", "", [1, 2], [3], 1.0),
        node("b", "", [1, 2], [4], 0.0),
        node("c", "", [1, 2], [5], 2.0),
        node("d", "b", [6], [7], 8.0),
    )
    assert [row.reward for row in ledger.rows(INDIVIDUAL, 0.5)] == [1.0, 4.0, 2.0, 8.0]
    rows = ledger.rows(CONCAT, 0.5)
    assert [row.row_id for row in rows] == ["a", "c", "d"]
    check(
        rows[2],
        row_id="d",
        ids=[1, 2, 4, 6, 7],
        mask=[0, 0, 1, 0, 1],
        turns=[(3, 0.0), (5, 8.0)],
        reward=4.0,
    )


def test_a_conversation_of_its_own_inherits_nothing() -> None:
    # the sub-agent s is called between the main agent's a and b
    ledger = ledger_of(node("a", "", [1], [2]), node("s", "", [3], [4]), node("b", "a", [5], [6], 1.0))
    assert {row.row_id: row.reward for row in ledger.rows(INDIVIDUAL, 1.0)} == {
        "a": 1.0,
        "s": 0.0,
        "b": 1.0,
    }


def test_a_call_rendered_whole_gives_its_parent_its_return_but_shares_no_tokens() -> None:
    ledger = ledger_of(
        node("a", "", [1, 2], [3]),
        node("b", "a", [1, 20, 30, 4], [5], 1.0, is_rendered_whole=True, is_fork=True),
    )
    a, b = ledger.rows(CONCAT, 0.5)
    check(a, row_id="a", ids=[1, 2, 3], mask=[0, 0, 1], turns=[(3, 0.0)], reward=0.5)
    check(b, row_id="b", ids=[1, 20, 30, 4, 5], mask=[0, 0, 0, 0, 1], turns=[(5, 1.0)], reward=1.0)
    assert len(ledger.rows(INDIVIDUAL)) == 2
    assert [message.content for message in ledger.messages()] == ["a", "reply to a", "b", "reply to b"]


def test_without_any_reward_all_rows_have_none() -> None:
    ledger = ledger_of(node("a", "", [1], [2]), node("b", "a", [3], [4]))
    assert [row.reward for row in ledger.rows(INDIVIDUAL, 1.0)] == [0.0, 0.0]


def test_a_masked_call_is_context_and_a_row_that_trains_nothing_is_left_out() -> None:
    ledger = branching()
    ledger.mask("b", "the reply was not kept whole")
    assert [row.row_id for row in ledger.rows(INDIVIDUAL)] == ["a", "c", "d"]
    row = ledger.rows(CONCAT, 0.5)[0]
    check(
        row,
        row_id="c",
        ids=[1, 2, 3, 4, 5, 6, 7, 8],
        mask=[0, 0, 1, 0, 0, 0, 0, 1],
        turns=[(3, 1.0), (6, 0.0), (8, 4.0)],
        reward=2.0,
    )
    assert ledger.counts()["num_masked_calls"] == 1
    assert next(n for n in ledger.nodes if n.completion_id == "b").mask_reason


def test_a_token_without_a_finite_log_probability_is_not_trained_and_counted() -> None:
    ledger = ledger_of(node("a", "", [1], [2, 3, 4], logprobs=[-0.2, math.nan, -math.inf]))
    (row,) = ledger.rows(CONCAT)
    check(row, row_id="a", ids=[1, 2, 3, 4], mask=[0, 1, 0, 0], turns=[(4, 0.0)], reward=0.0)
    assert ledger.counts()["num_nonfinite_tokens"] == 2


def test_policy_versions_are_those_of_the_spans() -> None:
    spans = (TokenSpan(3, "", 2), TokenSpan(5, "", 1))
    ledger = ledger_of(node("a", "", [1, 1], [2, 3, 4], spans=spans))
    (row,) = ledger.rows(INDIVIDUAL)
    assert row.spans == spans


def test_a_later_reward_replaces_an_earlier_one_and_the_last_call_needs_no_id() -> None:
    ledger = branching()
    ledger.set_reward(7, "d")
    ledger.set_reward(-1.0)
    assert [node.reward for node in ledger.nodes] == [1.0, None, 4.0, -1.0]
    assert np.isclose(ledger.rows(INDIVIDUAL, 0.5)[0].reward, 1 + 0.5 * (2 - 1) / 2)


def test_steps_of_the_last_conversation_are_a_line_and_others_stand_for_themselves() -> None:
    """
    a (r 1) ── b (r 0) ── c (r 4)
            └─ d (r 2)               recorded last: the line is a, d
    s (r 7)                          a sub-agent
    """
    ledger = ledger_of(
        node("a", "", [1, 2], [3], 1.0),
        node("b", "a", [4], [5, 6]),
        node("c", "b", [7], [8], 4.0),
        node("s", "", [1, 2], [3], 7.0),
        node("d", "a", [4], [10], 2.0),
    )
    rows = {row.row_id: row for row in ledger.rows(ExportStyle.STEP, 0.5)}
    places = {name: row.first_turn for name, row in rows.items()}
    assert places == {"a": 0, "b": -1, "c": -1, "s": -1, "d": 1}
    # own rewards are the turns'; the row is credited its discounted return
    found = {n: (float(as_float32(r.turn_rewards)[0]), r.reward) for n, r in rows.items()}
    assert found == {"a": (1, 2), "b": (0, 2), "c": (4, 4), "s": (7, 7), "d": (2, 2)}
    names = {name: int(as_int64(row.turn_hashes)[0]) for name, row in rows.items()}
    assert names["b"] == names["d"]  # asked the same within the same conversation
    assert names["a"] == names["s"]
    assert len({names[name] for name in "abc"}) == 3


def test_a_step_row_has_the_tokens_of_an_individual_one() -> None:
    pairs = zip(branching().rows(ExportStyle.STEP), branching().rows(INDIVIDUAL), strict=True)
    for step, single in pairs:
        assert bytes(step.token_ids) == bytes(single.token_ids)
        assert bytes(step.loss_mask) == bytes(single.loss_mask)


@pytest.mark.parametrize("discount", [0.0, 0.5, 1.0])
def test_turns_of_a_conversation_are_worth_what_their_calls_are(discount: float) -> None:
    alone = {row.row_id: row.reward for row in branching().rows(INDIVIDUAL, discount)}
    first, second = branching().rows(CONCAT, discount)
    assert as_float32(first.turn_returns).tolist() == pytest.approx([alone[name] for name in "abc"])
    assert as_float32(second.turn_returns).tolist() == pytest.approx([alone["d"]])
    assert (first.reward, second.reward) == pytest.approx((alone["a"], alone["d"]))


@pytest.mark.parametrize("style", list(ExportStyle))
def test_rows_name_their_conversation_and_whether_it_was_given_a_reward(style: ExportStyle) -> None:
    ledger = ledger_of(
        node("a", "", [1], [2]),
        node("s", "", [3], [4]),
        node("b", "a", [5], [6], 0.0),  # 0 is a reward
        node("t", "s", [7], [8], is_rendered_whole=True),
    )
    rows = {row.row_id: (row.conversation, row.has_reward) for row in ledger.rows(style)}
    assert rows["b"] == (0, True)
    assert rows["s"] == rows["t"] == (1, False)


def test_a_masked_call_that_begins_a_row_is_not_what_the_row_is_worth() -> None:
    ledger = branching()
    ledger.mask("a", "the reply was not kept whole")
    first = ledger.rows(CONCAT, 0.5)[0]
    assert (first.row_id, first.reward) == ("c", 2.0)  # of b
    assert as_float32(first.turn_returns).tolist() == [2.0, 2.0, 4.0]


def test_the_rest_of_an_episodes_reward_is_the_episodes_own() -> None:
    ledger = ledger_of(node("a", "", [1], [2], 1.0), node("b", "a", [3], [4]), node("s", "", [5], [6]))
    for total, own, rewards in ((1.0, None, (1.0, None, None)), (3.5, 2.5, (1.0, None, 2.5))):
        ledger.settle(total)
        assert (ledger.reward, ledger.rewards) == (own, rewards)
    for total in (0.0, 2.0):
        plain = ledger_of(node("a", "", [1], [2]), node("b", "a", [3], [4]))
        plain.settle(total)
        assert (plain.reward, plain.rewards) == (total, (None, total))


def test_a_call_without_a_log_probability_for_each_token_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="call 'a': its log-probabilities are not those of its tokens"):
        ledger_of(node("a", "", [1, 2], [3, 4], logprobs=[-0.1]))
