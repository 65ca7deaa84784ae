"""What agents add for single estimators: greedy baselines and names of observations."""

from __future__ import annotations

import numpy as np
import pytest

from tailrace_agents.core.players import is_baseline
from tailrace_agents.core.tokens import EpisodeTokens, observation_hash
from tailrace_protos.base import as_int64
from tailrace_protos.episode import EnvTask, EpisodeTask
from tailrace_protos.generation import TokenSpan


@pytest.mark.parametrize(
    ("phase", "member", "switched_on", "expected"),
    [
        ("train", 0, True, True),
        ("train", 1, True, False),
        ("eval", 0, True, False),
        ("train", 0, False, False),
    ],
)
def test_the_first_member_of_a_training_group_is_the_baseline(
    phase: str, member: int, switched_on: bool, expected: bool
) -> None:
    task = EpisodeTask("g.0", "g", member, 0, phase, EnvTask("lake", 1), 0.0)  # type: ignore[arg-type]
    assert is_baseline(task, switched_on) is expected


def test_observations_are_named_within_their_task() -> None:
    assert observation_hash("1", "you see a door") == observation_hash("1", "you see a door")
    assert observation_hash("1", "you see a door") != observation_hash("1", "you see a wall")
    assert observation_hash("1", "you see a door") != observation_hash("2", "you see a door")


def test_every_answered_turn_carries_the_name_of_what_it_began_with() -> None:
    tokens = EpisodeTokens()
    names = [observation_hash("1", text) for text in ("door", "wall")]
    for name in names:
        tokens.insert(np.array([1, 2], np.int32))
        tokens.sample(np.array([3], np.int32), np.array([-1.0], np.float32), (TokenSpan(0, "", 1),))
        tokens.finish_turn(0.5, name)
    tokens.sample(np.array([3], np.int32), np.array([-1.0], np.float32), (TokenSpan(0, "", 1),))
    assert as_int64(tokens.row().row.turn_hashes).tolist() == names
