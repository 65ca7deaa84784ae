"""Data of agents for single estimators: greedy baselines and names of observations."""

from __future__ import annotations

import pytest

from tailrace_agents.core.machine import is_baseline
from tailrace_agents.core.token_policy import observation_hash, observation_hasher
from tailrace_protos.base import as_int64
from tailrace_protos.episode import EnvTask, EpisodeTask
from tests.unit.tailrace_agents.env_world import play_env
from tests.unit.tailrace_agents.fakes import ScriptedPolicy, StairsEnv, renderer


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
    first, second = observation_hasher("1"), observation_hasher("2")
    assert observation_hash(first, "you see a door") == observation_hash(
        observation_hasher("1"), "you see a door"
    )
    assert observation_hash(first, "you see a door") != observation_hash(first, "you see a wall")
    assert observation_hash(first, "you see a door") != observation_hash(second, "you see a door")


async def test_every_answered_turn_carries_the_name_of_what_it_began_with() -> None:
    policy = ScriptedPolicy("Left", "Right", "Right", "Right")
    result = await play_env(StairsEnv(), renderer(), policy, seed=3)
    (row,) = result.transcript.rows(1.0)
    views = ["PFFF\n", "PFFF\n", "FFFF\nPFFF\n", "FFFF\nFFFF\nPFFF\n"]
    names = [observation_hash(observation_hasher("3"), view) for view in views]
    assert as_int64(row.turn_hashes).tolist() == names
