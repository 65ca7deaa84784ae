"""`remax` from trajectories to gradients: the greedy member is the baseline and is not trained."""

from __future__ import annotations

import numpy as np
import torch
from msgspec.structs import replace

from tailrace_protos.base import as_int32, pack_int32
from tailrace_protos.trajectory import Trajectory, TrajectoryGroup
from tests.unit.tailrace_learner.factory import VOCABULARY, group, random_group
from tests.unit.tailrace_learner.stepping import Stepper, distance, stepped

GREEDY = 1


def played(index: int) -> TrajectoryGroup:
    """A group of four whose second member was played at temperature 0."""
    members = random_group(index, num_members=4).members
    return group([replace(one, is_greedy=place == GREEDY) for place, one in enumerate(members)], index)


GROUPS = [played(index) for index in range(2)]


def with_baseline(given: TrajectoryGroup, baseline: Trajectory) -> TrajectoryGroup:
    members = list(given.members)
    members[GREEDY] = baseline
    return replace(given, members=tuple(members))


def test_advantages_are_returns_beyond_the_greedy_one() -> None:
    stepper = Stepper(len(GROUPS), adv_estimator="remax")
    metrics = stepper.step(GROUPS, 1).metrics
    for prepared, given in zip(stepper.trainer.groups, GROUPS, strict=True):
        greedy = given.members[GREEDY]
        others = [one for one in given.members if one is not greedy]
        assert len(prepared.rows) == len(others)
        for row, member in zip(prepared.rows, others, strict=True):
            np.testing.assert_allclose(row.advantages, member.reward - greedy.reward, rtol=1e-5)
            ids = as_int32(member.rows[0].token_ids)
            assert row.token_ids.tolist() == ids[: len(row.token_ids)].tolist()
    count = sum(len(row.targets) for row in stepper.rows)
    assert metrics["num_trained_tokens"] == count


def test_what_the_greedy_member_said_moves_no_weight_but_what_it_got_does() -> None:
    wanted = stepped(GROUPS, adv_estimator="remax").grads[0]
    greedy = GROUPS[0].members[GREEDY]
    row = greedy.rows[0]
    other_ids = (as_int32(row.token_ids) + 1) % VOCABULARY
    spoken = replace(greedy, rows=(replace(row, token_ids=pack_int32(other_ids)),))
    found = stepped([with_baseline(GROUPS[0], spoken), GROUPS[1]], adv_estimator="remax").grads[0]
    assert distance(found, wanted) < 1e-6
    richer = replace(greedy, reward=greedy.reward + 1.0)
    found = stepped([with_baseline(GROUPS[0], richer), GROUPS[1]], adv_estimator="remax").grads[0]
    assert distance(found, wanted) > 1e-2


def test_without_a_greedy_member_nothing_is_learnt() -> None:
    plain = [replace(each, members=random_group(0, num_members=4).members) for each in GROUPS[:1]]
    result = stepped(plain, adv_estimator="remax")
    assert result.metrics["loss"] is None
    assert all(not torch.any(grads) for grads in result.grads)
