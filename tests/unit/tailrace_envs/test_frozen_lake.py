"""FrozenLake as text: turns, invalid replies, seeds, splits and configuration."""

from __future__ import annotations

import gymnasium
import numpy as np
import pytest
from gymnasium.envs.toy_text.frozen_lake import generate_random_map, is_valid
from numpy.typing import NDArray

from tailrace.config import ConfigError
from tailrace_envs import FrozenLakeText, UnknownEnvTypeError, make_env
from tailrace_envs.frozen_lake import INVALID_NOTE, RULES, TILE, parse_action
from tailrace_envs.frozen_lake_expert import best_moves
from tailrace_envs.frozen_lake_maps import holes_of, map_for_seed, map_pools, maps_of


def winning_replies(env: FrozenLakeText, seed: int) -> list[str]:
    """Words that lead to the goal."""
    env.reset(seed=seed)
    words = []
    while words[-1:] != ["end"]:
        words.append(best_moves(env.lake_map, env.position)[0])
        if env.step(words[-1])[2]:
            return words
    return words


def test_the_first_observation_shows_the_map_with_the_agent_on_the_start() -> None:
    env = FrozenLakeText()
    observation, info = env.reset(seed=3)
    assert info == {"instructions": ""}
    assert observation == "\n".join(env.lake_map).replace("S", "P") + "\n"
    assert [len(line) for line in observation.splitlines()] == [4, 4, 4, 4]


def test_a_view_shows_the_cells_around_the_agent_and_where_the_lake_ends() -> None:
    whole, near = (
        FrozenLakeText(size=6, split="all"),
        FrozenLakeText(size=6, split="all", view_radius=2),
    )
    seed = next(seed for seed in range(99) if map_for_seed(6, 0.8, "all", seed)[0][:2] == "SF")
    for env in (whole, near):
        env.reset(seed=seed)
    grid, view = (env.step("Right")[0].splitlines() for env in (whole, near))
    assert view == ["#####"] * 2 + [f"#{line[:4]}" for line in grid[:3]]
    assert view[2][2] == "P"
    wide = FrozenLakeText(size=4, view_radius=6, instructions=True)
    assert wide.observation_space.contains(wide.reset(seed=seed)[0])


def test_an_observation_is_in_the_observation_space() -> None:
    env = FrozenLakeText(instructions=True)
    observation, _ = env.reset(seed=3)
    assert observation.startswith(RULES)
    assert env.observation_space.contains(observation)
    assert env.observation_space.contains(env.step("what?")[0])


def test_the_goal_pays_one_and_reports_success() -> None:
    env = FrozenLakeText()
    *way, last = winning_replies(env, seed=11)
    env.reset(seed=11)
    for word in way:
        _, reward, terminated, truncated, info = env.step(word)
        assert (reward, terminated, truncated) == (0.0, False, False)
        assert "success" not in info
    observation, reward, terminated, truncated, info = env.step(f"I go {last.upper()}!")
    assert (reward, terminated, truncated) == (1.0, True, False)
    assert info == {"invalid_action": False, "success": 1.0}
    assert observation.endswith("P\n")


def test_a_hole_ends_the_episode_without_success() -> None:
    env = FrozenLakeText()
    seed = next(seed for seed in range(1024) if map_for_seed(4, 0.8, "train", seed)[1][0] == "H")
    env.reset(seed=seed)
    _, reward, terminated, _, info = env.step("Down")
    assert (reward, terminated, info["success"]) == (0.0, True, 0.0)


def test_an_invalid_reply_is_answered_penalised_and_counts_as_a_turn() -> None:
    env = FrozenLakeText(invalid_action_penalty=0.25, max_turns=2)
    before, _ = env.reset(seed=0)
    observation, reward, terminated, truncated, info = env.step("north, please")
    assert observation == INVALID_NOTE + before
    assert (reward, terminated, truncated) == (-0.25, False, False)
    assert info["invalid_action"] is True
    _, reward, terminated, truncated, info = env.step("")
    assert (reward, terminated, truncated) == (-0.25, False, True)
    assert info["success"] == 0.0


def test_max_turns_truncates() -> None:
    env = FrozenLakeText(max_turns=3)
    env.reset(seed=0)
    results = [env.step("Left")[2:4] for _ in range(3)]
    assert results == [(False, False), (False, False), (False, True)]


def test_a_finished_episode_takes_no_step_until_reset() -> None:
    env = FrozenLakeText(max_turns=1)
    with pytest.raises(gymnasium.error.ResetNeeded):
        env.step("Left")
    env.reset(seed=0)
    env.step("Left")
    with pytest.raises(gymnasium.error.ResetNeeded):
        env.step("Left")


@pytest.mark.parametrize(
    ("reply", "action"),
    [("Left", 0), ("DOWN", 1), ("go right then up", 2), ("Up.", 3), ("upwards", None), ("", None)],
)
def test_the_first_whole_direction_word_is_the_action(reply: str, action: int | None) -> None:
    assert parse_action(reply) == action


def test_instances_on_one_map_do_not_move_each_other() -> None:
    first, second = FrozenLakeText(), FrozenLakeText()
    first.reset(seed=5)
    grid, _ = second.reset(seed=5)
    first.step(best_moves(first.lake_map, first.position)[0])
    assert second.grid() == grid
    assert first.grid() != grid


def test_seed_and_replies_fix_a_slippery_episode() -> None:
    def play() -> list[str]:
        env = FrozenLakeText(is_slippery=True, p=1.0, size=8, split="all", max_turns=30)
        env.reset(seed=9)
        return [env.step(("Right", "Down")[turn % 2])[0] for turn in range(20)]

    assert play() == play()
    straight = FrozenLakeText(p=1.0, size=8, split="all", max_turns=30)
    straight.reset(seed=9)
    assert play() != [straight.step(("Right", "Down")[turn % 2])[0] for turn in range(14)]


def test_resets_without_a_seed_follow_the_last_seed() -> None:
    env = FrozenLakeText()
    env.reset(seed=1)
    drawn = [env.reset()[0] for _ in range(5)]
    env.reset(seed=1)
    assert [env.reset()[0] for _ in range(5)] == drawn
    assert len(set(drawn)) > 1


def _cells_between(some: NDArray[np.float32], others: NDArray[np.float32]) -> NDArray[np.float32]:
    """Numbers of cells in which each of some maps differs from each of the others."""
    a, b = some.reshape(len(some), -1), others.reshape(len(others), -1)
    return a.sum(1)[:, None] + b.sum(1) - 2 * a @ b.T


@pytest.mark.parametrize(("size", "p"), [(3, 0.8), (4, 0.8), (4, 0.6), (5, 0.8), (6, 0.8), (8, 0.8)])
def test_no_held_out_map_is_within_one_cell_of_a_train_map_or_of_an_image_of_one(
    size: int, p: float
) -> None:
    pools = map_pools(size, p)
    held_out, train = (
        np.array([holes_of(lake_map) for lake_map in maps], np.float32)
        for maps in (pools.held_out, pools.train)
    )
    near = min(
        _cells_between(np.rot90(side, turns, axes=(1, 2)), held_out).min()
        for side in (train, train.swapaxes(1, 2))
        for turns in range(4)
    )
    assert near >= 2


def test_seeds_select_distinct_maps_and_the_pools_are_large_enough() -> None:
    pools = map_pools(4, 0.8)
    assert len({map_for_seed(4, 0.8, "held_out", seed) for seed in range(247)}) == 247
    assert len(set(pools.train)) == len(pools.train) >= 1000
    assert map_for_seed(4, 0.8, "train", 0) == map_for_seed(4, 0.8, "train", len(pools.train))


def test_consecutive_seeds_mix_maps_of_few_and_of_many_holes() -> None:
    num_holes = np.array([holes_of(lake_map).sum() for lake_map in map_pools(4, 0.8).train])
    means = [part.mean() for part in np.array_split(num_holes, 8)]
    assert max(means) - min(means) < 0.5, "in the order of drawing: from 3.2 to 6.1"


def test_maps_are_drawn_as_gymnasium_draws_them() -> None:
    """The same share of holes, and only maps with a path."""
    theirs = [holes_of(tuple(generate_random_map(8, 0.8, seed))).mean() for seed in range(300)]
    ours = [holes_of(lake_map).mean() for lake_map in map_pools(8, 0.8).every[:3000]]
    assert float(np.mean(ours)) == pytest.approx(float(np.mean(theirs)), abs=0.01)
    assert all(
        is_valid([list(row) for row in lake_map], 8) for lake_map in map_pools(8, 0.8).every[:50]
    )


def test_a_map_has_the_same_split_at_every_probability_of_ice() -> None:
    train = set(map_pools(4, 0.8).train) | set(map_pools(4, 0.7).train)
    held_out = set(map_pools(4, 0.8).held_out) | set(map_pools(4, 0.7).held_out)
    assert train.isdisjoint(held_out)


def test_larger_grids_are_played_and_drawn() -> None:
    env = FrozenLakeText(size=8, split="held_out")
    observation, _ = env.reset(seed=1)
    assert [len(line) for line in observation.splitlines()] == [8] * 8


def test_a_picture_shows_the_agent_where_it_stands() -> None:
    env = FrozenLakeText()
    env.reset(seed=2)
    first, start = env.render(), env.position
    env.step(best_moves(env.lake_map, env.position)[0])
    second = env.render()
    assert first.shape == (256, 256, 3)
    assert first.dtype.name == "uint8"
    changed = {(row // TILE, column // TILE) for row, column, _ in np.argwhere(first != second)}
    assert changed == {divmod(start, 4), divmod(env.position, 4)}


def test_a_picture_needs_a_reset_first() -> None:
    with pytest.raises(gymnasium.error.ResetNeeded, match="reset before render"):
        FrozenLakeText().render()


def test_an_unknown_env_type_names_the_closest() -> None:
    with pytest.raises(UnknownEnvTypeError, match="did you mean 'frozen_lake'"):
        make_env("frozenlake", {})


def test_an_unknown_key_names_the_closest() -> None:
    with pytest.raises(ConfigError, match="unknown key 'max_turn'; did you mean 'max_turns'"):
        make_env("frozen_lake", {"max_turn": 3})


@pytest.mark.parametrize(
    "env_config",
    [
        {"size": 1},
        {"size": "4"},
        {"p": 0.2},
        {"max_turns": 0},
        {"invalid_action_penalty": -1.0},
        {"split": "test"},
    ],
)
def test_an_impossible_value_is_a_value_error_that_names_its_key(env_config: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=next(iter(env_config))):
        make_env("frozen_lake", env_config)


def test_settings_that_leave_a_split_empty_are_refused() -> None:
    empty = "held_out" if map_pools(4, 1.0).train else "train"
    with pytest.raises(ValueError, match=f"has no {empty} map"):
        make_env("frozen_lake", {"p": 1.0, "split": empty})


def test_ice_that_no_path_crosses_makes_no_maps() -> None:
    with pytest.raises(ValueError, match=r"has no train map \(0 distinct maps in all\)"):
        maps_of(4, 1e-9, "train")
