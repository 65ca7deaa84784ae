"""Desired replicas: bounds, patience, one step at a time, and nothing without a fresh status."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from tailrace_autoscaler.config import AutoscalerConfig, ScalingTarget
from tailrace_autoscaler.core.planner import Observation, Planner

AGENTS = {"agents": ScalingTarget(min_replicas=1, max_replicas=8, episodes_per_replica=10)}
SERVERS = {"inference-a": ScalingTarget(min_replicas=1, max_replicas=4)}


def seen(now_s: float, *, episodes: int = 0, busy: float = 0.5, ready: int = 0, blocked_by: str = "",
         age_s: float = 0.0) -> Observation:  # fmt: skip
    return Observation(now_s, age_s, "training", blocked_by, episodes, ready, {"inference-a": busy})


def played(config: AutoscalerConfig, observations: list[Observation], start: int = 1) -> list[int]:
    """Counts of the one target over time, when whoever scales follows at once."""
    planner, (name,), counts = Planner(config), config.targets, [start]
    for each in observations:
        counts.append(planner.plan(each, {name: counts[-1]})[name])
    return counts[1:]


def test_agents_follow_the_episodes_after_up_after_s() -> None:
    config = AutoscalerConfig(targets=AGENTS, up_after_s=10, down_after_s=60)
    counts = played(config, [seen(5.0 * at, episodes=45) for at in range(5)])
    assert counts == [1, 1, 5, 5, 5]


def test_a_burst_shorter_than_up_after_s_moves_nothing() -> None:
    config = AutoscalerConfig(targets=AGENTS, up_after_s=10, down_after_s=60)
    loads = [45, 5, 45, 5, 45, 5]
    assert set(played(config, [seen(5.0 * at, episodes=load) for at, load in enumerate(loads)])) == {1}


def test_replicas_fall_to_the_most_that_was_wanted_during_down_after_s() -> None:
    config = AutoscalerConfig(targets=AGENTS, up_after_s=0, down_after_s=20)
    loads = [50, 20, 20, 30, *[20] * 8]
    counts = played(config, [seen(5.0 * at, episodes=load) for at, load in enumerate(loads)], start=5)
    assert counts[:4] == [5] * 4
    assert counts[4] == 5  # 50 was wanted 20 s ago
    assert counts[5] == 3
    assert counts[-1] == 2


def test_servers_grow_by_one_while_the_learner_waits_and_they_are_busy() -> None:
    config = AutoscalerConfig(targets=SERVERS, up_after_s=10, busy_above=0.8)
    counts = played(config, [seen(5.0 * at, busy=0.95) for at in range(12)])
    assert max(b - a for a, b in pairwise(counts)) == 1
    assert counts[-1] == 4
    assert played(config, [seen(5.0 * at, busy=0.95, ready=3) for at in range(12)])[-1] == 1
    high = AutoscalerConfig(targets=SERVERS, up_after_s=10, busy_above=0.99)
    assert played(high, [seen(5.0 * at, busy=0.95) for at in range(12)])[-1] == 1


def test_the_next_server_waits_for_the_last_one_to_live() -> None:
    config = AutoscalerConfig(targets=SERVERS, up_after_s=10, busy_above=0.8)

    def looks(num_servers: int) -> list[Observation]:
        return [
            replace(seen(5.0 * at, busy=0.95), num_servers={"inference-a": num_servers})
            for at in range(12)
        ]

    assert played(config, looks(1))[-1] == 2
    assert played(config, looks(2), start=2)[-1] == 3


def test_servers_shrink_when_groups_wait_for_the_learner_or_they_idle() -> None:
    config = AutoscalerConfig(targets=SERVERS, down_after_s=10, busy_below=0.3)
    waiting = [seen(5.0 * at, busy=0.95, ready=9, blocked_by="credit") for at in range(8)]
    assert played(config, waiting, start=4)[-1] < 4
    assert played(config, [seen(5.0 * at, busy=0.1) for at in range(8)], start=4)[-1] < 4
    low = AutoscalerConfig(targets=SERVERS, down_after_s=10, busy_below=0.05)
    assert played(low, [seen(5.0 * at, busy=0.1) for at in range(8)], start=4)[-1] == 4


def test_the_last_server_goes_without_episodes_and_comes_back_for_them() -> None:
    """A target without servers has no busy share."""
    targets = {"inference-a": ScalingTarget(min_replicas=0, max_replicas=2)}
    config = AutoscalerConfig(targets=targets, up_after_s=10, down_after_s=10)
    full = {"busy": 0.1, "ready": 9, "blocked_by": "buffer"}
    rest = [seen(5.0 * at, **full) for at in range(6)]  # type: ignore[arg-type]
    assert played(config, rest, start=1)[-1] == 0
    needed = [seen(5.0 * at, episodes=3, **full) for at in range(6)]  # type: ignore[arg-type]
    assert set(played(config, needed, start=1)) == {1}
    for load in ({"episodes": 3, "ready": 9}, {"episodes": 0, "ready": 0}):
        none = [replace(seen(5.0 * at, **load), busy_share={"inference-a": None}) for at in range(6)]  # type: ignore[arg-type]
        assert played(config, none, start=0)[-1] == 1


def test_without_a_fresh_status_counts_are_held() -> None:
    config = AutoscalerConfig(targets=AGENTS, up_after_s=0, down_after_s=0, stale_s=20)
    stale = [seen(5.0 * at, episodes=70, age_s=21) for at in range(5)]
    assert played(config, stale, start=3) == [3] * 5
    never = [Observation(0.0, math.inf), Observation(5.0, math.inf)]
    assert played(config, never, start=3) == [3, 3]


def test_a_new_planner_whom_nobody_tells_the_replicas_begins_with_what_is_there() -> None:
    """KEDA and HPA act on its count: a restart of the autoscaler must not scale anything down."""
    config = AutoscalerConfig(targets=AGENTS | SERVERS, up_after_s=10, down_after_s=60)
    planner = Planner(config)
    assert planner.plan(Observation(0.0, math.inf), {}) == {}
    looks = [replace(seen(5.0 * at, episodes=45), num_servers={"inference-a": 3}) for at in range(1, 7)]
    counts = [planner.plan(each, {}) for each in looks]
    assert counts[0] == {}
    assert counts[1:] == [{"agents": 5, "inference-a": 3}] * 5
    assert planner.plan(Observation(60.0, math.inf), {}) == {"agents": 5, "inference-a": 3}


def test_an_idle_run_needs_the_least() -> None:
    config = AutoscalerConfig(targets=AGENTS, down_after_s=10)
    assert played(config, [seen(5.0 * at) for at in range(6)], start=8)[-1] == 1


@given(st.lists(st.tuples(st.integers(0, 500), st.floats(0, 1), st.integers(0, 5)), max_size=60))
def test_counts_stay_within_their_bounds(history: list[tuple[int, float, int]]) -> None:
    for targets, (low, high) in ((AGENTS, (1, 8)), (SERVERS, (1, 4))):
        config = AutoscalerConfig(targets=targets, up_after_s=0, down_after_s=0)
        observations = [
            seen(5.0 * at, episodes=episodes, busy=busy, ready=ready)
            for at, (episodes, busy, ready) in enumerate(history)
        ]
        assert all(low <= count <= high for count in played(config, observations))


def test_a_load_between_the_thresholds_flaps_nothing() -> None:
    config = AutoscalerConfig(targets=SERVERS, up_after_s=5, down_after_s=5)
    counts = played(config, [seen(5.0 * at, busy=0.4 + 0.05 * (at % 9)) for at in range(60)], start=2)
    assert set(counts) == {2}
