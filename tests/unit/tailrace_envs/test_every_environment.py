"""Contract of every environment: seeds determine everything, and observations are text."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from functools import partial
from typing import Any

import gymnasium
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tailrace.chat import Renderer
from tailrace.config import ConfigError
from tailrace_envs import check_env_config, make_env
from tests.unit.tailrace_envs.playing import KINDS, Playing, fingerprint, played, replies_of
from tests.unit.tailrace_envs.resuming import byte_renderer, check_every_resumption

SPLIT = [kind for kind in KINDS if kind != "gymnasium"]  # its environments know no splits

Step = tuple[str, float, bool, bool, dict[str, Any]]


@pytest.fixture(scope="module")
def renderer(tmp_path_factory: pytest.TempPathFactory) -> Renderer:
    return byte_renderer(tmp_path_factory.mktemp("tokenizer"))


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=15, deadline=None)
@given(
    seeds=st.lists(st.integers(0, 2**31 - 1), min_size=2, max_size=4), order_seed=st.integers(0, 2**32)
)
def test_seed_and_replies_fix_an_episode_whatever_is_played_at_the_same_time(
    kind: str, seeds: list[int], order_seed: int
) -> None:
    alone = [played(kind, seed) for seed in seeds]
    together = [Playing(kind, seed) for seed in seeds]
    order = random.Random(order_seed)
    while not all(one.is_over for one in together):
        order.choice(together).step()
    assert [one.seen for one in together] == alone


@pytest.mark.parametrize("kind", KINDS)
def test_an_instance_plays_one_episode_after_another_as_a_new_one_would(kind: str) -> None:
    env = make_env(kind, KINDS[kind][0])
    for seed in (3, 4, 3):
        seen: list[object] = [env.reset(seed=seed)]
        for reply in replies_of(kind, seed):
            seen.append(step := env.step(reply))
            if step[2] or step[3]:
                break
        assert seen == played(kind, seed)


@pytest.mark.parametrize("kind", KINDS)
def test_different_seeds_give_different_episodes(kind: str) -> None:
    env = make_env(kind, KINDS[kind][0])
    assert len({env.reset(seed=seed)[0] for seed in range(20)}) > 3


@pytest.mark.parametrize("kind", KINDS)
async def test_an_episode_that_is_handed_on_goes_on_from_its_journal(
    kind: str, renderer: Renderer
) -> None:
    make = partial(make_env, kind, KINDS[kind][0])
    await check_every_resumption(make, replies_of(kind, 5), renderer)


@pytest.mark.parametrize("kind", SPLIT)
def test_train_and_held_out_tasks_have_nothing_in_common(kind: str) -> None:
    config = KINDS[kind][0]
    first = {
        split: {make_env(kind, {**config, "split": split}).reset(seed=seed)[0] for seed in range(60)}
        for split in ("train", "held_out")
    }
    assert first["train"].isdisjoint(first["held_out"])


@pytest.mark.parametrize("kind", KINDS)
def test_success_is_told_with_the_last_step_alone(kind: str) -> None:
    steps: list[Step] = played(kind, 1)[1:]  # type: ignore[assignment]
    assert ["success" in step[4] for step in steps] == [False] * (len(steps) - 1) + [True]
    assert 0.0 <= steps[-1][4]["success"] <= 1.0


@pytest.mark.parametrize("kind", KINDS)
def test_every_environment_has_frames(kind: str) -> None:
    env = make_env(kind, KINDS[kind][0])
    env.reset(seed=1)
    frame = env.render()
    assert isinstance(frame, str) or (frame.ndim == 3 and frame.shape[2] == 3)


@pytest.mark.parametrize("kind", KINDS)
def test_after_the_end_only_reset_is_allowed(kind: str) -> None:
    playing = Playing(kind, 1)
    for _ in range(200):
        try:
            _, _, terminated, truncated, _ = playing.env.step(KINDS[kind][1][0])
        except gymnasium.error.ResetNeeded:
            break
        assert not (terminated and truncated)
    else:
        pytest.fail("the episode never ended")
    playing.env.reset(seed=2)
    playing.env.step(KINDS[kind][1][0])


def test_another_process_plays_the_same_episodes_in_whatever_order() -> None:
    seeds = [0, 7, 2**31 - 1]
    found = subprocess.run(
        [sys.executable, "-m", "tests.unit.tailrace_envs.playing", *map(str, reversed(seeds))],
        env={**os.environ, "PYTHONHASHSEED": "5"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert found.stdout.split() == [fingerprint(seeds)]


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "verifiers"])
def test_rewards_that_no_step_may_have_are_refused_by_name(kind: str) -> None:
    config = {**KINDS[kind][0], "invalid_action_penalty": float("inf")}
    with pytest.raises(ConfigError, match="invalid_action_penalty must be finite"):
        check_env_config(kind, config)


@pytest.mark.parametrize(
    "key", ["penalty_for_step", "reward_box_on_target", "penalty_box_off_target", "reward_finished"]
)
def test_infinite_rewards_of_sokoban_are_refused_by_name(key: str) -> None:
    with pytest.raises(ConfigError, match=f"{key} must be finite"):
        check_env_config("sokoban", {key: float("-inf")})
