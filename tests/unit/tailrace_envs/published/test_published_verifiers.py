"""Published environments for verifiers, unchanged, by entries that a user writes."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from tailrace.config import ConfigError
from tailrace_envs import make_env
from tests.unit.tailrace_envs.published.page import page_entry
from tests.unit.tailrace_envs.resuming import byte_renderer, check_every_resumption

needed = "make test-envs runs these in their own environment"
gym = pytest.importorskip("reasoning_gym", reason=needed)
pytest.importorskip("mazebench", reason=needed)

pytestmark = pytest.mark.timeout(900)  # the packages alone take many seconds to import

LEGS = {"gym": "leg_counting", "num_train_examples": 20, "num_eval_examples": 10, "seed": 4}
COUNTING = {"env_id": "verifiers:ReasoningGymEnv", "env_args": LEGS}
MAZE = {"env_id": "mazebench", "env_args": {"max_actions": 3}}


@pytest.mark.parametrize(("name", "asked"), [("legs", "how many legs"), ("maze", "Start of run.")])
def test_the_entries_of_the_page_about_environments_play(name: str, asked: str) -> None:
    entry = page_entry(name)
    env = make_env(entry["env_type"], entry["env_config"])
    assert asked in env.reset(seed=0)[0]
    env.close()


def test_rows_of_both_splits_are_asked_in_the_order_of_seeds_and_answers_paid() -> None:
    problems = list(gym.create_dataset("leg_counting", size=30, seed=4))
    splits = {"train": problems[:20], "held_out": problems[20:]}
    for split, rows in splits.items():
        env = make_env("verifiers", {**COUNTING, "split": split})
        for seed in (*range(len(rows)), len(rows) + 3):
            row = rows[seed % len(rows)]
            assert env.reset(seed=seed)[0].endswith(row["question"])
            _, reward, terminated, _, info = env.step(f"<answer>{row['answer']}</answer>")
            assert (reward, terminated, info["success"]) == (1.0, True, 1.0)


def test_a_wrong_answer_is_paid_what_its_package_says_and_a_form_is_a_number_beside_it() -> None:
    env = make_env("verifiers", COUNTING)
    for reply, is_well_formed in (("<answer>-1</answer>", 1.0), ("many", 0.0)):
        env.reset(seed=0)
        _, reward, _, _, info = env.step(reply)
        assert (reward, info["success"]) == (0.0, 0.0)
        assert info["check_answer_reward_func"] == 0.0
        assert (info["format_reward_func"] == 1.0) == bool(is_well_formed)


def test_a_maze_is_walked_move_by_move_until_its_actions_are_used_up() -> None:
    env = make_env("verifiers", MAZE)
    assert env.reset(seed=0)[0].startswith("Start of run.")
    observation, reward, terminated, _, _ = env.step("down")
    assert observation.startswith("Previous action: move. Direction: down.")
    assert (reward, terminated) == (0.0, False)
    assert "unknown command" in env.step("fly")[0]
    _, reward, terminated, truncated, info = env.step("up")
    assert (reward, terminated, truncated) == (0.0, True, False)
    assert (info["visited_level_count"], info["num_turns"], info["success"]) == (1.0, 3.0, 0.0)


async def test_a_maze_goes_on_from_the_journal(tmp_path: Path) -> None:
    make = partial(make_env, "verifiers", MAZE)
    whole = await check_every_resumption(make, ["left", "down", "quit"], byte_renderer(tmp_path))
    assert whole.metrics["num_turns"] == 3.0


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"env_args": {"gim": "leg_counting"}}, "ReasoningGymEnv.*gim.*env_args"),
        ({"env_args": {"gym": "leg_cuonting"}}, "ReasoningGymEnv.*leg_cuonting.*env_args"),
        ({"env_id": "maze-bench", "env_args": {}}, "maze-bench.*install it"),
        ({"env_id": "verifiers:GymReasoning"}, "env_id: module 'verifiers' has no 'GymReasoning'"),
        ({"env_id": "no_such_package:load"}, "env_id: cannot import 'no_such_package'"),
    ],
)
def test_what_cannot_be_made_is_named_with_the_remedy(change: dict[str, object], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        make_env("verifiers", {**COUNTING, **change})
