"""Sokoban: rules, rewards, levels, the solver, pictures and the tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import gymnasium
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from tailrace_envs import make_env
from tailrace_envs.sokoban.board import DIRECTIONS, Board, Position
from tailrace_envs.sokoban.config import SokobanConfig
from tailrace_envs.sokoban.environment import INVALID_NOTE, RULES, TILE, SokobanText
from tailrace_envs.sokoban.levels import NoLevelError, level_for_seed
from tailrace_envs.sokoban.solver import SearchLimitError, push_distances, solve
from tailrace_envs.sokoban.tokenizer import build_sokoban_tokenizer

SIZES = [
    SokobanConfig(),
    SokobanConfig(dim_room=(5, 7), num_boxes=2, max_pulls=15, max_turns=60),
    SokobanConfig(dim_room=(8, 8), num_boxes=3, max_pulls=12, max_turns=120, wall_share=0.3),
]


def board_of(*rows: str) -> tuple[Board, Position]:
    """Board of a text."""
    letters = "".join(rows)
    cells = range(len(letters))
    board = Board(
        len(rows[0]),
        tuple(letter != "#" for letter in letters),
        frozenset(cell for cell in cells if letters[cell] in "O*S"),
    )
    boxes = frozenset(cell for cell in cells if letters[cell] in "X*")
    return board, Position(next(cell for cell in cells if letters[cell] in "PS"), boxes)


def on(board: Board, position: Position, **options: float) -> SokobanText:
    env = SokobanText(**options)
    env.reset(seed=0)
    env.board, env.position = board, position
    return env


def test_walking_pushing_and_standing_still() -> None:
    env = on(*board_of("#######", "#P_X_O#", "#######"))
    assert env.step("Right")[0] == "#######\n#_PX_O#\n#######\n"
    assert env.step("Right")[0] == "#######\n#__PXO#\n#######\n"
    assert env.step("Up")[0] == "#######\n#__PXO#\n#######\n"
    observation, reward, terminated, _, info = env.step("Right")
    assert observation == "#######\n#___P*#\n#######\n"
    assert (reward, terminated, info["success"]) == (pytest.approx(10.9), True, 1.0)


def test_a_view_shows_the_cells_around_the_player_and_walls_beyond_the_room() -> None:
    env = on(*board_of("#######", "#P_XXO#", "#__O__#", "#######"), view_radius=2)
    view = "#####\n#####\n#_PXX\n#__O_\n#####\n"
    assert env.step("Right")[0] == view
    assert env.step("jump")[0] == INVALID_NOTE + view


def test_offsets_of_boxes_and_goals_from_the_player_stand_below_the_board() -> None:
    env = on(*board_of("#######", "#P_XXO#", "#__O__#", "#######"), offsets=True)
    assert env.step("Right")[0].splitlines()[-1] == "X 0,1 0,2 O 0,3 1,1"
    assert env.step("Down")[0].splitlines()[-1] == "X -1,1 -1,2 O -1,3 0,1"
    assert env.step("jump")[0].splitlines()[-1] == "X -1,1 -1,2 O -1,3 0,1"


@pytest.mark.parametrize("num_boxes", [1, 2])
def test_the_tokenizer_reads_a_row_and_an_offset_as_two_tokens_each(
    num_boxes: int, tmp_path: Path
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(build_sokoban_tokenizer(tmp_path))
    env = SokobanText(dim_room=(8, 8), num_boxes=num_boxes, split="all", view_radius=2, offsets=True)
    for seed in range(40):
        text, _ = env.reset(seed=seed)
        for word in ("Up", "Left", "Down", "Right", "Right", "Up"):
            token_ids = tokenizer.encode(text)
            assert tokenizer.unk_token_id not in token_ids
            assert (len(token_ids), tokenizer.decode(token_ids)) == (10 + 4 * num_boxes + 1, text)
            text, _, terminated, *_ = env.step(word)
            if terminated:
                break


def test_two_boxes_in_a_row_do_not_move() -> None:
    board, position = board_of("#######", "#PXX_O#", "#OO__O#", "#######")
    assert board.moved(position, 1) == position


def test_pushing_a_box_off_its_goal_costs_and_the_player_shows_on_goals() -> None:
    env = on(*board_of("#######", "#P*_XO#", "#######"))
    observation, reward, terminated, *_ = env.step("Right")
    assert observation == "#######\n#_SXXO#\n#######\n"
    assert (reward, terminated) == (pytest.approx(-1.1), False)


def test_every_reward_is_a_key() -> None:
    start = board_of("#######", "#PXO__#", "#______#"[:7], "#######")
    keys = {
        "penalty_for_step": -0.5,
        "reward_box_on_target": 3.0,
        "penalty_box_off_target": -2.0,
        "reward_finished": 20.0,
    }
    assert on(*start, **keys).step("Right")[1] == pytest.approx(-0.5 + 3.0 + 20.0)
    off = board_of("#######", "#P*_XO#", "#######")
    assert on(*off, **keys).step("Right")[1] == pytest.approx(-0.5 - 2.0)


def test_an_invalid_reply_is_answered_penalised_and_counts_as_a_turn() -> None:
    env = SokobanText(invalid_action_penalty=0.25, max_turns=20)
    shown, _ = env.reset(seed=1)
    observation, reward, *_, info = env.step("push it")
    assert (observation, info["invalid_action"]) == (INVALID_NOTE + shown, True)
    assert reward == pytest.approx(-0.35)


def test_the_limit_of_turns_truncates_and_reports() -> None:
    env = SokobanText(max_turns=4)
    env.reset(seed=0)
    *_, (_, _, terminated, truncated, info) = [env.step("hm") for _ in range(4)]
    assert (terminated, truncated, info["success"]) == (False, True, 0.0)
    assert info["num_invalid_actions"] == 4
    with pytest.raises(gymnasium.error.ResetNeeded):
        env.step("Up")


def test_the_rules_come_first_when_asked_for() -> None:
    plain, _ = SokobanText().reset(seed=3)
    assert SokobanText(instructions=True).reset(seed=3)[0] == RULES + plain


@pytest.mark.parametrize("config", SIZES)
def test_every_level_has_a_solution_within_the_turns_and_no_box_starts_on_a_goal(
    config: SokobanConfig,
) -> None:
    for seed in range(25):
        board, start, max_moves = level_for_seed(config, seed)
        moves = solve(board, start)
        assert moves is not None
        assert 1 <= len(moves) <= max_moves <= config.max_turns
        assert len(start.boxes) == len(board.goals) == config.num_boxes
        assert start.boxes.isdisjoint(board.goals)
        rows = board.text(start).split()
        assert (len(rows), len(rows[0])) == config.dim_room


def test_walls_are_a_share_of_the_inner_cells() -> None:
    def num_floor(wall_share: float) -> int:
        config = SokobanConfig(wall_share=wall_share, split="all")
        return sum(level_for_seed(config, 3).board.is_floor)

    assert [num_floor(share) for share in (0.0, 0.25)] == [16, 12]


def test_the_moves_of_a_solution_solve_the_level() -> None:
    env = SokobanText()
    for seed in range(30):
        env.reset(seed=seed)
        moves = solve(env.board, env.position)
        assert moves is not None
        results = [env.step(move) for move in moves]
        assert [result[2] for result in results] == [False] * (len(moves) - 1) + [True]


def brute_force(board: Board, start: Position) -> int | None:
    """Moves of a shortest solution, by breadth-first search."""
    frontier, seen, depth = {start}, {start}, 0
    while frontier:
        if any(map(board.is_solved, frontier)):
            return depth
        frontier = {board.moved(one, step) for one in frontier for step in board.steps} - seen
        seen |= frontier
        depth += 1
    return None


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10_000), moves=st.lists(st.integers(0, 3), max_size=12))
def test_solutions_are_shortest_and_dead_positions_are_known(seed: int, moves: list[int]) -> None:
    board, position, _ = level_for_seed(SIZES[0], seed)
    for move in moves:
        position = board.moved(position, board.steps[move])
    found = solve(board, position)
    assert (None if found is None else len(found)) == brute_force(board, position)


def test_a_box_in_a_corner_is_given_up_at_once() -> None:
    board, position = board_of("######", "#X_P_#", "#__O_#", "######")
    assert push_distances(board)[board.num_columns + 1] == -1
    assert solve(board, position) is None


def test_a_search_that_takes_too_long_says_so() -> None:
    level = level_for_seed(SIZES[2], 1)
    with pytest.raises(SearchLimitError, match="max_states"):
        solve(level.board, level.start, max_states=2)


@pytest.mark.parametrize(("num_boxes", "side"), [(1, 6), (2, 6), (2, 8)])
def test_held_out_levels_have_walls_that_no_train_level_has_even_mirrored_or_rotated(
    num_boxes: int, side: int
) -> None:
    layouts = {}
    for split in ("train", "held_out"):
        config = SokobanConfig(split=split, num_boxes=num_boxes, dim_room=(side, side))
        boards = [level_for_seed(config, seed).board for seed in range(300)]
        floors = {np.array(board.is_floor).reshape(config.dim_room).tobytes() for board in boards}
        layouts[split] = floors
    assert min(map(len, layouts.values())) >= 20
    images = {
        np.ascontiguousarray(np.rot90(image, turns)).tobytes()
        for floor in layouts["train"]
        for grid in [np.frombuffer(floor, bool).reshape(side, side)]
        for image in (grid, grid.T)
        for turns in range(4)
    }
    assert images.isdisjoint(layouts["held_out"])


def test_levels_never_change() -> None:
    level = level_for_seed(SokobanConfig(split="all"), 7)
    assert level.board.text(level.start).split() == [
        "######",
        "#_#P_#",
        "#__X##",
        "#____#",
        "#O___#",
        "######",
    ]


def test_more_pulls_make_longer_solutions() -> None:
    def mean_moves(max_pulls: int) -> float:
        config = SokobanConfig(max_pulls=max_pulls, max_turns=100)
        levels = (level_for_seed(config, seed) for seed in range(60))
        return float(np.mean([len(solve(level.board, level.start) or ()) for level in levels]))

    assert mean_moves(2) < mean_moves(20)


def test_a_picture_shows_every_cell() -> None:
    board, position = board_of("######", "#P_XO#", "######")
    env = on(board, position)
    picture = env.render()
    assert picture.shape == (3 * TILE, 6 * TILE, 3)
    assert picture.dtype == np.uint8
    centres = picture[TILE + TILE // 2, TILE // 2 :: TILE]
    assert len({tuple(colour) for colour in centres.tolist()}) == 5
    env.step("Right")
    assert (env.render() != picture).any()


def test_a_picture_needs_a_reset_first() -> None:
    with pytest.raises(gymnasium.error.ResetNeeded):
        SokobanText().render()


@pytest.mark.parametrize(
    ("env_config", "named"),
    [
        ({"dim_room": [3, 6]}, "dim_room"),
        ({"dim_room": [6, 6, 6]}, "dim_room"),
        ({"dim_room": [4, 4]}, "dim_room 4 by 4 leaves no room .* use at least 4 by 5"),
        ({"num_boxes": 0}, "num_boxes"),
        ({"num_boxes": 5}, "num_boxes"),
        ({"wall_share": 0.9}, "wall_share"),
        ({"max_pulls": 0}, "max_pulls"),
        ({"max_turns": 0}, "max_turns"),
        ({"split": "test"}, "split"),
        ({"invalid_action_penalty": -1.0}, "invalid_action_penalty"),
        ({"num_box": 1}, "did you mean 'num_boxes'"),
    ],
)
def test_an_impossible_value_is_a_value_error_that_names_its_key(
    env_config: dict[str, object], named: str
) -> None:
    with pytest.raises(ValueError, match=named):
        make_env("sokoban", env_config)


@pytest.mark.parametrize("split", ["train", "held_out"])
@pytest.mark.parametrize(
    ("dim_room", "num_boxes"), [((4, 5), 1), ((5, 4), 1), ((4, 6), 2), ((5, 5), 2), ((4, 8), 3)]
)
def test_the_smallest_rooms_have_levels_with_as_many_boxes_as_are_allowed(
    dim_room: tuple[int, int], num_boxes: int, split: Literal["train", "held_out"]
) -> None:
    config = SokobanConfig(dim_room=dim_room, num_boxes=num_boxes, split=split)
    for seed in range(10):
        board, start, _ = level_for_seed(config, seed)
        assert solve(board, start)
    with pytest.raises(ValueError, match="num_boxes"):
        SokobanConfig(dim_room=dim_room, num_boxes=num_boxes + 1)


def test_settings_without_any_level_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tailrace_envs.sokoban.levels.MAX_ATTEMPTS", 40)
    with pytest.raises(NoLevelError, match=r"max_turns 1, .*: raise dim_room or max_turns"):
        make_env("sokoban", {"dim_room": [8, 8], "num_boxes": 3, "max_turns": 1})


@pytest.mark.parametrize(
    ("reply", "step"), [("Up", -6), ("I go DOWN", 6), ("left then right", -1), ("upward", None)]
)
def test_the_first_whole_direction_word_is_the_move(reply: str, step: int | None) -> None:
    board, position = board_of("######", "######", "##PXO#", "######", "######")
    env = on(board, position)
    _, _, _, _, info = env.step(reply)
    assert info["invalid_action"] is (step is None)
    assert len(DIRECTIONS) == len(board.steps)
