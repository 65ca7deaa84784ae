"""The drift sentinel: errors of servers are measured, a wrong one is found, its tokens left out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from tailrace_learner.config import LearnerConfig
from tailrace_learner.core.drift import Sentinel, drift_sums
from tailrace_learner.core.lineage import Ancestry
from tailrace_learner.core.row_builder import RowBuilder
from tailrace_learner.core.rows import PreparedGroup, Row
from tailrace_learner.core.run_state import RunState
from tailrace_protos.event import ServerQuarantined
from tailrace_protos.trajectory import ServerSpan, Trajectory
from tests.unit.tailrace_learner.factory import config, group, trajectory
from tests.unit.tailrace_learner.stepping import Stepper
from tests.unit.tailrace_learner.test_learner import (
    FakeSource,
    FakeWorld,
    Ready,
    learner,
    steps,
)

GOOD, BAD = "inference-0#aa", "inference-1#bb"


def by(source: str, member: Trajectory) -> Trajectory:
    """The same episode, sampled by one server."""
    rows = [
        replace(row, server_spans=(ServerSpan(source, sum(bytes(row.loss_mask))),))
        for row in member.rows
    ]
    return replace(member, rows=tuple(rows))


def row(current: Sequence[bool], *spans: ServerSpan) -> Row:
    size = len(current)
    zeros = np.zeros(size, np.float32)
    return Row(
        "r",
        np.arange(size),
        np.arange(1, size + 1),
        np.arange(size),
        zeros,
        zeros,
        np.zeros(size, np.int64),
        np.array(current),
        server_spans=spans,
    )


def prepare(members: Sequence[Trajectory], step: int, quarantine: dict[str, int]) -> PreparedGroup:
    """As a learner that has done `step` steps; version v is of step v."""
    builder = RowBuilder(config(), 4, Ancestry("0-a"), quarantine=quarantine)
    return builder.prepare(group(members), step, {version: ("0-a", version) for version in range(3)})


def numbers(source: str, mean: float, num_tokens: int) -> dict[str, float | None]:
    return {f"drift/{source}": mean, f"drift_tokens/{source}": float(num_tokens)}


def test_only_version_matched_tokens_of_known_servers_are_summed() -> None:
    rows = [
        row([True, False, True, True], ServerSpan("a", 2), ServerSpan("b", 2)),
        row([True, True]),  # nobody knows who sampled these
        row([False], ServerSpan("c", 1)),
        row([True], ServerSpan("a", 1)),
    ]
    errors = torch.arange(1.0, 9.0)
    current = np.concatenate([each.is_current for each in rows])
    found = {name: (float(total), n) for name, total, n in drift_sums(rows, errors, current)}
    assert found == {"a": (1.0 + 8.0, 2), "b": (3.0 + 4.0, 2)}


def test_a_step_tells_the_error_of_every_server() -> None:
    members = [by(GOOD, trajectory(0, 1.0)), by(BAD, trajectory(1, 0.0))]
    stepper = Stepper(1)
    told = stepper.step([group(members)], 1).metrics
    rows = {span.source: each for each in stepper.rows for span in each.server_spans}
    assert told[f"drift_tokens/{GOOD}"] == told[f"drift_tokens/{BAD}"] == 3.0
    errors = [told[f"drift/{source}"] for source in (GOOD, BAD)]
    assert set(rows) == {GOOD, BAD}
    assert all(error is not None and error > 0.1 for error in errors)  # the factory's are invented


def test_tokens_of_older_versions_give_no_reading() -> None:
    members = [by(GOOD, trajectory(i, float(i), versions=(0, 0, 0))) for i in range(2)]
    told = Stepper(1).step([group(members)], 1).metrics
    assert not [name for name in told if name.startswith("drift")]


def test_metrics_name_servers_and_not_their_incarnations() -> None:
    told = numbers("s#1", 0.5, 10) | numbers("s#2", 0.1, 30) | numbers("old", 0.2, 5)
    Sentinel(None, 1).read(told, 0)
    expected = {"drift/s": 0.2, "drift_tokens/s": 40.0, "drift/old": 0.2, "drift_tokens/old": 5.0}
    assert told == pytest.approx(expected)


def test_a_server_beyond_the_limit_is_quarantined_once_since_its_last_good_reading() -> None:
    sentinel = Sentinel(0.1, 8)
    assert sentinel.read(numbers(BAD, 0.01, 8) | numbers(GOOD, 0.01, 8), 3) == []
    assert sentinel.read(numbers(GOOD, 0.02, 8), 4) == []
    found = sentinel.read(numbers(BAD, 0.7, 9) | numbers(GOOD, 0.01, 8), 5)
    assert found == [ServerQuarantined("inference-1", "bb", pytest.approx(0.7), 0.1, 9, 5, 3)]
    assert sentinel.quarantine == {BAD: 3}
    assert sentinel.read(numbers(BAD, 0.7, 9) | numbers(GOOD, 0.01, 8), 6) == []
    assert sentinel.quarantine == {BAD: 3}
    assert sentinel.read(numbers("inference-1#new", 0.0, 99), 7) == []


def test_too_few_tokens_wait_for_those_of_later_steps() -> None:
    sentinel = Sentinel(0.1, 10)
    assert sentinel.read(numbers(BAD, 0.5, 6), 0) == []
    (found,) = sentinel.read(numbers(BAD, 0.3, 6), 1)
    assert (found.num_tokens, found.mismatch) == (12, pytest.approx(0.4))
    assert (found.step, found.good_step) == (1, -1)


def test_where_all_servers_differ_none_is_blamed() -> None:
    sentinel = Sentinel(0.1, 1)
    told = numbers(BAD, 0.5, 6) | numbers(GOOD, 0.6, 6)
    assert sentinel.read(told, 0) == []
    assert told["num_servers_beyond_mismatch"] == 2.0
    assert sentinel.quarantine == {}


def test_a_server_whose_new_start_is_no_better_is_let_be_where_none_was_ever_good() -> None:
    sentinel = Sentinel(0.1, 1)
    assert len(sentinel.read(numbers("s#1", 0.5, 6), 0)) == 1
    told = numbers("s#2", 0.5, 6)
    assert sentinel.read(told, 1) == []
    assert told["num_servers_beyond_mismatch"] == 1.0
    assert sentinel.read(numbers("s#2", 0.5, 6) | numbers(GOOD, 0.0, 6), 2) != []
    assert set(sentinel.quarantine) == {"s#1", "s#2"}


def test_a_server_that_was_good_is_started_anew_whenever_it_goes_wrong() -> None:
    sentinel = Sentinel(0.1, 1)
    for start in ("s#1", "s#2", "s#3"):
        assert sentinel.read(numbers(start, 0.0, 6), 0) == []
        assert len(sentinel.read(numbers(start, 0.5, 6), 1)) == 1


def test_without_a_limit_errors_are_told_and_nothing_is_done() -> None:
    sentinel, told = Sentinel(None, 1), numbers(BAD, 5.0, 9)
    assert sentinel.read(told, 0) == []
    assert told["drift/inference-1"] == 5.0
    assert sentinel.quarantine == {}


def test_an_error_that_is_no_number_is_not_a_servers() -> None:
    assert Sentinel(0.1, 1).read(numbers(BAD, float("nan"), 9), 0) == []


@pytest.mark.parametrize(
    ("key", "value"), [("max_mismatch", 0.0), ("max_mismatch", -1.0), ("min_mismatch_tokens", 0)]
)
def test_limits_that_mean_nothing_are_refused(key: str, value: float) -> None:
    with pytest.raises(ValueError, match=key):
        config(**{key: value})


def test_quarantined_tokens_newer_than_the_last_good_reading_are_left_out() -> None:
    versions = (0, 1, 2)
    members = [by(source, trajectory(i, i, versions=versions)) for i, source in enumerate((GOOD, BAD))]
    prepared = prepare(members, step=2, quarantine={BAD: 0})
    assert [len(each.targets) for each in prepared.rows] == [3, 1]
    assert prepared.counts["num_quarantined_tokens"] == 2
    assert [each.server_spans for each in prepared.rows] == [
        (ServerSpan(GOOD, 3),),
        (ServerSpan(BAD, 1),),
    ]


def test_of_a_turn_that_two_servers_sampled_only_one_ones_tokens_are_left_out() -> None:
    member = trajectory(0, 1.0)
    shared = replace(member.rows[0], server_spans=(ServerSpan(BAD, 1), ServerSpan(GOOD, 2)))
    members = [replace(member, rows=(shared,)), trajectory(1, 0.0)]
    prepared = prepare(members, step=1, quarantine={BAD: -1})
    first, second = prepared.rows
    assert first.targets.tolist() == [3, 4]
    assert first.server_spans == (ServerSpan(GOOD, 2),)
    assert len(second.targets) == 3
    assert second.server_spans == ()


def ready(index: int, version: int, rewards: dict[str, float]) -> Ready:
    """A group with one episode of each source."""
    members = [
        by(source, trajectory(i, reward, versions=(version,) * 3, group_id=f"g{index}"))
        for i, (source, reward) in enumerate(rewards.items())
    ]
    return Ready(f"{index}-0", 100, group(members, index))


@pytest.mark.parametrize("max_mismatch", [1e-9, None])
async def test_a_learner_tells_of_a_wrong_server_and_trains_its_tokens_no_more(
    max_mismatch: float | None,
) -> None:
    entries = [ready(0, 1, {BAD: 0.0, "": 1.0}), ready(1, 2, {BAD: 0.0, "": 1.0})]
    world = FakeWorld()
    settings: dict[str, Any] = {"groups_per_step": 1, "min_mismatch_tokens": 3}
    one = learner(FakeSource(entries), world, max_mismatch=max_mismatch, **settings)
    await one.run_forever()
    found = [event for event in world.events if isinstance(event, ServerQuarantined)]
    first, second = (step.metrics for step in steps(world))
    assert first["drift/inference-1"] > 0.01
    assert first["num_quarantined_tokens"] == 0
    assert world.saved[-1].quarantine == one.state.quarantine == ({BAD: -1} if found else {})
    if max_mismatch is None:
        assert found == []
        assert (second["num_quarantined_tokens"], second["num_trained_tokens"]) == (0, 6)
    else:
        assert [(event.server_id, event.incarnation, event.good_step) for event in found] == [
            ("inference-1", "bb", -1)
        ]
        assert (second["num_quarantined_tokens"], second["num_trained_tokens"]) == (3, 3)
        assert "drift/inference-1" not in second


async def test_a_resumed_learner_still_leaves_a_wrong_servers_tokens_out() -> None:
    world = FakeWorld(book={5: ("0-a", 0)})
    state = RunState(step=0, lineage="0-a", quarantine={BAD: -1})
    one = learner(
        FakeSource([ready(0, 5, {BAD: 0.0, "": 1.0})]),
        world,
        state=state,
        groups_per_step=1,
        max_steps=1,
    )
    await one.run_forever()
    (step,) = steps(world)
    assert step.metrics["num_quarantined_tokens"] == 3


def test_the_default_limit_lies_between_arithmetic_and_wrong_weights() -> None:
    limit = LearnerConfig().max_mismatch
    assert limit is not None
    assert 0.02 < limit < 0.3
