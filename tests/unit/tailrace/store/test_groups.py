"""Events of an episode when it settles."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from tailrace.store.groups import settled_event
from tailrace_protos.base import decode, encode, pack_float32, pack_int32, pack_uint8
from tailrace_protos.episode import EnvTask, Outcome
from tailrace_protos.trajectory import TokenRow, Trajectory
from tests.provenance import spans_of


def row(mask: Sequence[int], versions: Sequence[int], turn_ends: Sequence[int]) -> TokenRow:
    return TokenRow(
        token_ids=pack_int32(range(len(mask))),
        loss_mask=pack_uint8(mask),
        inference_logprobs=pack_float32([-1.0] * len(mask)),
        spans=spans_of(versions),
        turn_ends=pack_int32(turn_ends),
        turn_rewards=pack_float32([0.0] * len(turn_ends)),
        reward=0.5,
        row_id="r",
    )


def trajectory(*rows: TokenRow) -> Trajectory:
    task = EnvTask("sums", 3, 7, {"answer": "42"})
    return Trajectory(
        "g0.1", "g0", 1, 0, "train", task, Outcome.OK, "", 0.5, {"success": 1.0}, 1.0, 2.0, rows
    )


def test_counts_and_versions_are_those_of_all_rows() -> None:
    event = settled_event(
        trajectory(
            row([0, 1, 1, 0, 1], [4, 5, 5], [3, 5]),
            row([0, 0, 0, 1], [3], [4]),
        )
    )
    assert event.num_sampled_tokens == 4
    assert event.num_turns == 3
    assert event.context_tokens == 5
    assert (event.min_policy_version, event.max_policy_version) == (3, 5)
    assert (event.reward, event.success) == (0.5, 1.0)


@pytest.mark.parametrize(
    ("outcome", "reward", "metrics", "success"),
    [
        (Outcome.OK, 0.2, {}, 1.0),
        (Outcome.OK, -0.2, {}, 0.0),
        (Outcome.OK, 0.2, {"success": 0.0}, 0.0),
        (Outcome.OK, 0.0, {"success": 0.5}, 0.5),
        (Outcome.POLICY_FAILURE, 0.0, {}, 0.0),
        (Outcome.INFRA_FAILURE, 0.0, {}, None),
    ],
)
def test_an_episode_succeeds_as_its_task_reports_or_by_its_reward(
    outcome: Outcome, reward: float, metrics: dict[str, float], success: float | None
) -> None:
    task = EnvTask("rows", 1)
    ended = Trajectory("g0.1", "g0", 1, 0, "train", task, outcome, "", reward, metrics, 1.0, 2.0, ())
    assert settled_event(ended).success == success


def test_an_episode_without_rows_or_without_a_sampled_token_has_no_version() -> None:
    for rows in ((), (row([0, 0], [], []),)):
        event = settled_event(trajectory(*rows))
        assert (event.num_sampled_tokens, event.num_turns) == (0, 0)
        assert (event.min_policy_version, event.max_policy_version) == (-1, -1)


def test_a_trajectory_with_rows_and_its_tasks_row_cross_the_wire_unchanged() -> None:
    sent = trajectory(row([0, 1], [4], [2]), row([1], [5], [1]))
    received = decode(encode(sent), Trajectory)
    assert received == sent
    assert received.task.row == {"answer": "42"}
    assert received.task.ordinal == 7


def test_an_event_fits_into_a_message_whatever_the_reason_of_an_episode_is() -> None:
    task, reason = EnvTask("rows", 1), "\N{GRINNING FACE}" * 500_000
    ended = Trajectory(
        "g.1", "g", 1, 0, "train", task, Outcome.INFRA_FAILURE, reason, 0.0, {}, 1.0, 2.0
    )
    event = settled_event(ended)
    assert reason.startswith(event.reason)
    assert 1000 < len(encode(event)) < 512 * 1024
