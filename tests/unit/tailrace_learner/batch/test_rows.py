"""Trained tokens: validity, staleness, finiteness."""

from __future__ import annotations

import math

import numpy as np
import pytest
from msgspec.structs import replace

from tailrace_learner.core.batch.lineage import Ancestor, Ancestry, newest_versions
from tailrace_learner.core.batch.row_builder import TrainingRowBuilder
from tailrace_learner.core.batch.rows import demonstration_row
from tailrace_protos.base import pack_float32, pack_int32
from tailrace_protos.episode import OVER_BUDGET, Outcome
from tailrace_protos.generation import GIVEN_VERSION
from tests.provenance import spans_of
from tests.unit.tailrace_learner.factory import (
    config,
    episode_of_rows,
    group,
    random_group,
    token_row,
    trajectory,
)

BOOK = {1: ("0-a", 0), 2: ("0-a", 1), 3: ("0-a", 2), 4: ("0-a", 3)}


def builder(max_staleness: int = 1, **settings: object) -> TrainingRowBuilder:
    return TrainingRowBuilder(config(**settings), max_staleness, Ancestry("0-a"))


def test_a_row_ends_before_its_last_trained_token_and_keeps_ids_and_logprobs() -> None:
    members = [trajectory(0, 1.0), trajectory(1, 0.0)]
    prepared = builder().prepare(group(members), 0, BOOK)
    row = prepared.rows[0]
    assert row.token_ids.tolist() == [0, 1, 2, 3]
    assert row.targets.tolist() == row.target_ids.tolist() == [2, 3, 4]
    assert row.inference_logprobs.tolist() == [-1.0, -2.0, -0.5]
    assert row.is_current.all()
    assert prepared.rewards == (1.0, 0.0)
    assert prepared.successes == (1.0, 0.0)


def test_tokens_older_than_max_staleness_are_masked_and_counted() -> None:
    members = [trajectory(0, 1.0, versions=(1, 2, 3)), trajectory(1, 0.0, versions=(3, 3, 3))]
    prepared = builder(max_staleness=1).prepare(group(members), 2, BOOK)
    first, second = prepared.rows
    assert first.targets.tolist() == [3, 4]
    assert first.staleness.tolist() == [1, 0]
    assert first.is_current.tolist() == [False, True]
    assert second.targets.tolist() == [2, 3, 4]
    assert prepared.counts["num_stale_tokens"] == 1
    assert not prepared.drop_reason


def test_a_group_with_stale_tokens_is_dropped_when_the_user_wants_it() -> None:
    members = [trajectory(0, 1.0, versions=(1, 2, 3)), trajectory(1, 0.0)]
    dropping = TrainingRowBuilder(config(), 1, Ancestry("0-a"), drops_stale=True)
    assert dropping.prepare(group(members), 2, BOOK).drop_reason == "stale"


def test_a_wholly_stale_member_gives_no_row_but_still_counts_in_the_baseline() -> None:
    members = [trajectory(0, 1.0), trajectory(1, 0.0, versions=(4, 4, 4))]
    prepared = builder(max_staleness=0).prepare(group(members), 3, BOOK)
    assert [row.row_id for row in prepared.rows] == ["g0.1"]
    assert prepared.rows[0].advantages[0] == pytest.approx(-0.5 / (math.sqrt(0.5) + 1e-6))


def test_non_finite_inference_logprobs_mask_their_token_and_are_counted() -> None:
    members = [trajectory(0, 1.0, logprobs=(-1.0, math.nan, -math.inf)), trajectory(1, 0.0)]
    prepared = builder().prepare(group(members), 0, BOOK)
    assert prepared.rows[0].targets.tolist() == [2]
    assert prepared.counts["num_nonfinite_tokens"] == 2


def test_tokens_that_no_policy_sampled_are_fresh_and_need_no_logprob() -> None:
    given = (GIVEN_VERSION, GIVEN_VERSION, 1)
    members = [trajectory(0, 1.0, versions=given, logprobs=(math.nan, -1.0, math.nan))]
    prepared = builder().prepare(group([*members, trajectory(1, 0.0)]), 0, BOOK)
    row = prepared.rows[0]
    assert row.targets.tolist() == [2, 3]
    assert row.staleness.tolist() == [0, 0]
    assert not row.is_current.any()
    assert prepared.counts["num_nonfinite_tokens"] == 1


def test_a_loss_that_looks_at_turns_is_told_of_which_every_trained_token_is() -> None:
    """The second turn's only token is too old; what comes after the last end is the last turn's."""
    row = replace(
        token_row("", 1.0, [0, 1, 1, 0, 1, 1, 0, 1, 1], version=3),
        turn_ends=pack_int32([3, 5, 8]),
        turn_rewards=pack_float32([0.0, 0.0, 1.0]),
        spans=spans_of([3, 3, 1, 2, 3, 3]),
    )
    members = [episode_of_rows(0, 1.0, [row]), trajectory(1, 0.0, versions=(3, 3, 3))]
    of_turns, other = builder(loss="segment").prepare(group(members), 2, BOOK).rows
    assert of_turns.targets.tolist() == [1, 2, 5, 7, 8]
    assert of_turns.turns is not None
    assert of_turns.turns.tolist() == [0, 0, 2, 2, 2]
    assert other.turns is not None
    assert other.turns.tolist() == [0, 0, 0]
    fresh, _ = builder(max_staleness=2, loss="segment").prepare(group(members), 2, BOOK).rows
    assert fresh.turns is not None
    assert fresh.turns.tolist() == [0, 0, 1, 2, 2, 2]
    assert all(each.turns is None for each in builder().prepare(group(members), 2, BOOK).rows)


def test_infrastructure_failures_leave_the_sample_and_the_baseline() -> None:
    members = [
        trajectory(0, 1.0),
        trajectory(1, 0.0),
        trajectory(2, 0.0, outcome=Outcome.INFRA_FAILURE),
        trajectory(3, 0.0, outcome=Outcome.TIMEOUT),
        trajectory(4, 0.0, outcome=Outcome.CANCELLED),
    ]
    prepared = builder().prepare(group(members), 0, BOOK)
    assert [row.row_id for row in prepared.rows] == ["g0.0", "g0.1"]
    assert prepared.rows[0].advantages[0] == pytest.approx(0.5 / (math.sqrt(0.5) + 1e-6))
    assert prepared.counts["num_invalid_episodes"] == 3
    assert prepared.rewards == (1.0, 0.0)


def test_policy_failures_are_learnt_from() -> None:
    members = [trajectory(0, 1.0), trajectory(1, 0.0, outcome=Outcome.POLICY_FAILURE)]
    assert len(builder().prepare(group(members), 0, BOOK).rows) == 2


@pytest.mark.parametrize(
    ("choice", "reason"), [("count", ""), ("skip", ""), ("redraw", "zero_variance")]
)
def test_equal_returns_are_counted_skipped_or_drawn_again(choice: str, reason: str) -> None:
    members = [trajectory(0, 1.0, versions=(9, 1, 1)), trajectory(1, 1.0)]  # 9: not trained
    prepared = builder(zero_variance_groups=choice).prepare(group(members), 0, BOOK)
    assert prepared.rows == ()
    assert prepared.drop_reason == reason
    assert prepared.untrained == ((2, 3) if choice == "count" else ())
    assert not prepared.counts.get("num_stale_tokens")
    assert prepared.counts["num_groups_zero_variance"] == 1


def test_tokens_of_an_unknown_version_are_never_trained() -> None:
    members = [trajectory(0, 1.0, versions=(9, 1, 1)), trajectory(1, 0.0)]
    assert builder().unknown_versions(group(members), BOOK)
    prepared = builder().prepare(group(members), 0, BOOK)
    assert prepared.rows[0].targets.tolist() == [3, 4]


def test_ages_on_a_resumed_lineage_count_from_the_fork() -> None:
    # 0-a ran to step 5; a checkpoint of step 3 was resumed as 3-b, then again from 3 as 3-c, now at 5.
    ancestry = Ancestry("0-a").resumed(3)
    dead, current = ancestry.current, Ancestry("0-a").resumed(3).current
    path = Ancestry(current, (Ancestor("0-a", 3),))
    book = {1: ("0-a", 2), 2: ("0-a", 3), 3: ("0-a", 5), 4: (dead, 4), 5: (current, 3), 6: (current, 5)}
    ages, own = path.ages(np.array([1, 2, 3, 4, 5, 6], dtype=np.int64), 5, book)
    assert ages.tolist() == [3, 2, 2, 2, 2, 0]
    assert own.tolist() == [True, True, False, False, True, True]
    ages, own = path.ages(np.array([2, 3, 5], dtype=np.int64), 3, book)
    assert ages.tolist() == [0, 0, 0]
    assert own.tolist() == [True, False, True]


def test_every_model_call_of_an_episode_is_a_row_with_its_own_return() -> None:
    calls = [token_row("0", 0.5, [0, 1, 1]), token_row("1", 1.0, [0, 0, 0, 1], first_id=9)]
    members = [episode_of_rows(0, 1.0, calls), trajectory(1, 0.0)]
    prepared = builder().prepare(group(members), 0, BOOK)
    assert [row.row_id for row in prepared.rows] == ["g0.0/0", "g0.0/1", "g0.1"]
    first, second, other = prepared.rows
    assert first.target_ids.tolist() == [1, 2]
    assert second.target_ids.tolist() == [12]
    scale = math.sqrt(0.5) + 1e-6
    assert [row.advantages[0] for row in (first, second, other)] == pytest.approx(
        [0.0, 0.5 / scale, -0.5 / scale]
    )
    assert prepared.rewards == (1.0, 0.0)  # episodes, not rows


def test_a_prefix_shared_by_two_rows_is_trained_in_one_of_them() -> None:
    leaves = [token_row("0", 1.0, [0, 1, 1, 0, 1]), token_row("1", 1.0, [0, 0, 0, 0, 1])]
    members = [episode_of_rows(0, 1.0, leaves), trajectory(1, 0.0)]
    first, second, _ = builder().prepare(group(members), 0, BOOK).rows
    assert first.targets.tolist() == [1, 2, 4]
    assert second.targets.tolist() == [4]
    assert second.token_ids.tolist() == [0, 1, 2, 3]  # read, not trained


def test_turns_that_gigpo_can_compare_with_none_are_counted() -> None:
    named = random_group(1, num_members=3, num_turns=4)
    calls = [token_row("0", 1.0, [0, 1]), token_row("1", 1.0, [0, 0, 1])]
    members = [episode_of_rows(0, 1.0, calls), trajectory(1, 0.0)]  # rows without hashes
    lost = trajectory(2, 0.0, outcome=Outcome.INFRA_FAILURE)
    gigpo = builder(adv_estimator="gigpo")
    assert gigpo.prepare(named, 0, BOOK).counts["num_unnamed_turns"] == 0
    assert gigpo.prepare(group([*members, lost]), 0, BOOK).counts["num_unnamed_turns"] == 3
    for settings in ({}, {"adv_estimator": "gigpo", "step_advantage_weight": 0.0}):
        counts = builder(**settings).prepare(group(members), 0, BOOK).counts
        assert "num_unnamed_turns" not in counts


def test_rows_without_a_sampled_token_are_left_out() -> None:
    nothing = [token_row("0", 1.0, [0, 1]), token_row("1", 1.0, [0, 0]), token_row("2", 1.0, [])]
    members = [episode_of_rows(0, 1.0, nothing), trajectory(1, 0.0), episode_of_rows(2, 1.0, ())]
    prepared = builder().prepare(group(members), 0, BOOK)
    assert [row.row_id for row in prepared.rows] == ["g0.0/0", "g0.1"]
    assert prepared.rewards == (1.0, 0.0)
    assert prepared.counts["num_invalid_episodes"] == 1


def test_an_unknown_version_is_found_in_any_row() -> None:
    rows = [token_row("0", 1.0, [0, 1]), token_row("1", 1.0, [0, 1], version=9)]
    assert builder().unknown_versions(group([episode_of_rows(0, 1.0, rows)]), BOOK) == {9}
    assert builder().unknown_versions(group([episode_of_rows(0, 1.0, ())]), BOOK) == set()


def test_a_demonstration_trains_its_mask_only() -> None:
    row = demonstration_row("d", np.array([5, 6, 7, 8, 9]), np.array([1, 0, 1, 1, 0], dtype=np.uint8))
    assert row is not None
    assert row.targets.tolist() == [2, 3]
    assert row.token_ids.tolist() == [5, 6, 7]
    assert demonstration_row("d", np.array([5, 6]), np.array([1, 0], dtype=np.uint8)) is None


@pytest.mark.parametrize(("choice", "trained"), [("train", 3), ("mask", 2)])
def test_episodes_that_were_cut_off_may_be_compared_without_being_trained(
    choice: str, trained: int
) -> None:
    cut = trajectory(1, 0.0, outcome=Outcome.POLICY_FAILURE)
    cut = replace(cut, metrics={**cut.metrics, OVER_BUDGET: 1.0})
    members = [trajectory(0, 1.0), cut, trajectory(2, 0.0)]
    prepared = builder(over_budget_episodes=choice).prepare(group(members), 0, BOOK)
    assert len(prepared.rows) == trained
    assert prepared.counts.get("num_masked_episodes", 0) == 3 - trained
    deviation = math.sqrt(1 / 3)
    assert prepared.rows[0].advantages[0] == pytest.approx((2 / 3) / (deviation + 1e-6))


@pytest.mark.parametrize("rewards", [(1.0, 1.0), (1.0,)])
def test_groups_that_teach_nothing_are_held_by_the_divergence(rewards: tuple[float, ...]) -> None:
    given = group([trajectory(index, reward) for index, reward in enumerate(rewards)])
    assert builder().prepare(given, 0, BOOK).rows == ()
    assert builder(entropy_loss_coef=0.01).prepare(given, 0, BOOK).rows == ()
    settings = {"init_kl_coef": 0.1}
    prepared = builder(**settings).prepare(given, 0, BOOK)
    assert [row.row_id for row in prepared.rows] == [f"g0.{i}" for i in range(len(rewards))]
    assert not any(row.advantages.any() for row in prepared.rows)
    assert not prepared.counts.get("num_groups_train")
    drawn_again = builder(zero_variance_groups="redraw", **settings).prepare(given, 0, BOOK)
    assert bool(drawn_again.drop_reason) == (len(rewards) > 1)


def test_a_book_of_versions_keeps_the_newest() -> None:
    book: dict[int, tuple[str, int]] = {}
    for version in range(0, 60_000, 3):
        book[version] = ("0-a", version)
        book = newest_versions(book)
    assert len(book) < 10_000
    assert [*book][-4000:] == [*range(48_000, 60_000, 3)]
