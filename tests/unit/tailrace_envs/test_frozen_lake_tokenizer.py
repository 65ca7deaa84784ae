"""The FrozenLake tokenizer and its demonstrations, through the real chat renderer."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from transformers import AutoTokenizer

from tailrace.chat import Renderer
from tailrace.config import ConfigError
from tailrace_envs import FrozenLakeText
from tailrace_envs.frozen_lake import parse_action
from tailrace_envs.frozen_lake_expert import best_moves, demonstrations
from tailrace_envs.frozen_lake_maps import map_pools
from tailrace_envs.frozen_lake_tokenizer import (
    build_frozen_lake_tokenizer,
    build_view_lake_tokenizer,
    row_tokens,
)
from tailrace_protos.weights import ModelCard

TURN = 6  # ids inserted before a reply


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_frozen_lake_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def renderer(directory: Path) -> Renderer:
    files = {path.name: path.read_bytes() for path in directory.iterdir()}
    return Renderer.from_model_card(ModelCard(config_json=b"{}", tokenizer_files=files))


def test_auto_tokenizer_loads_it_with_its_special_tokens(directory: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(directory)
    assert len(tokenizer) == 107
    assert (tokenizer.eos_token, tokenizer.pad_token) == ("<|end|>", "<|pad|>")
    assert tokenizer.eos_token_id != tokenizer.pad_token_id


def test_the_chat_template_agrees_with_the_renderer(directory: Path, renderer: Renderer) -> None:
    tokenizer = AutoTokenizer.from_pretrained(directory)
    grid = "PHFF\nFFFF\nHHFF\nFFFG\n"
    messages = [
        {"role": "user", "content": grid},
        {"role": "assistant", "content": "Left"},
        {"role": "user", "content": grid},
    ]
    whole = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    pieces = [
        renderer.observation_ids(grid, True),
        renderer.reply_ids("Left"),
        renderer.observation_ids(grid, False),
    ]
    assert np.concatenate(pieces).tolist() == whole


def test_a_turn_is_six_inserted_and_two_sampled_tokens(renderer: Renderer) -> None:
    env = FrozenLakeText(split="all")
    for seed in range(300):
        observation, _ = env.reset(seed=seed)
        for first in (True, False):
            assert len(renderer.observation_ids(observation, first)) == TURN
            observation, *_, truncated, _ = env.step("Left")
            assert not truncated
    assert [len(renderer.reply_ids(word)) for word in ("Left", "Down", "Right", "Up")] == [2, 2, 2, 2]


def test_every_row_that_occurs_is_one_token() -> None:
    env, rows = FrozenLakeText(split="all"), set(row_tokens())
    for seed in range(200):
        env.reset(seed=seed)
        for word in ("Right", "Down") * 3:
            observation, _, terminated, *_ = env.step(word)
            assert rows.issuperset(observation.splitlines(keepends=True))
            if terminated:
                break


@pytest.mark.parametrize("size", [2, 4, 5, 8, 12])
def test_the_view_tokenizer_reads_a_row_as_two_tokens_on_lakes_of_every_size(
    size: int, tmp_path: Path
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(build_view_lake_tokenizer(tmp_path))
    env = FrozenLakeText(size=size, p=0.7, split="all", view_radius=3)
    for seed in range(60):
        view, _ = env.reset(seed=seed)
        for word in ("Right", "Down", "Left", "Down", "Right", "Up"):
            token_ids = tokenizer.encode(view)
            num_outside = view.splitlines().count("#######")
            assert tokenizer.unk_token_id not in token_ids
            assert (len(token_ids), tokenizer.decode(token_ids)) == (14 - num_outside, view)
            view, _, terminated, *_ = env.step(word)
            if terminated:
                break


def test_any_text_encodes_and_known_text_survives(renderer: Renderer, directory: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(directory)
    for text in ("PFFFFFFF\nFFFFHFFG\n", "Invalid action.\nPHFF\n", "Left Up"):
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.encode("naïve Left") == [tokenizer.unk_token_id] * 5 + tokenizer.encode(" Left")
    assert len(renderer.observation_ids("PFFFFFFF\n" * 8, True)) > 8


def test_a_decoded_reply_is_the_word_without_markers(renderer: Renderer) -> None:
    assert renderer.decode(renderer.reply_ids("Right")) == "Right"


def test_demonstrations_are_replayable_episodes_of_train_maps(renderer: Renderer) -> None:
    train = {"\n".join(lake_map).replace("S", "P") + "\n" for lake_map in map_pools(4, 0.8).train}
    for token_ids, loss_mask in demonstrations(renderer, seed=1, num_episodes=40):
        assert len(token_ids) == len(loss_mask) == 8 * (len(token_ids) // 8)
        assert loss_mask == [0, 0, 0, 0, 0, 0, 1, 1] * (len(token_ids) // 8)
        assert len(token_ids) <= 80
        assert renderer.decode(np.array(token_ids[:TURN], dtype=np.int32)) in train


def test_demonstrations_depend_on_the_seed_alone(renderer: Renderer) -> None:
    first = list(demonstrations(renderer, seed=4, num_episodes=10))
    assert list(demonstrations(renderer, seed=4, num_episodes=10)) == first
    assert list(demonstrations(renderer, seed=5, num_episodes=10)) != first


def moves_of(renderer: Renderer, **options: float) -> list[tuple[list[str], int]]:
    """Grid before a move of the demonstrations, and the move."""
    found = []
    for ids, _ in demonstrations(renderer, seed=0, num_episodes=300, **options):
        for at in range(0, len(ids), 8):
            grid = renderer.decode(np.array(ids[at : at + TURN], dtype=np.int32)).splitlines()
            move = parse_action(renderer.decode(np.array(ids[at + TURN : at + 8], dtype=np.int32)))
            assert move is not None
            found.append((grid, move))
    return found


def cell_ahead(grid: list[str], move: int) -> str:
    """Letter of the cell that a move leads to; `#` outside of the grid."""
    (row, column) = next((r, line.index("P")) for r, line in enumerate(grid) if "P" in line)
    row, column = row + (move == 1) - (move == 3), column + (move == 2) - (move == 0)
    inside = 0 <= row < 4 and 0 <= column < 4
    return grid[row][column] if inside else "#"


def test_demonstrations_avoid_holes_and_walls_and_show_no_direction(renderer: Renderer) -> None:
    moves = moves_of(renderer, random_moves=0.0)
    assert {cell_ahead(grid, move) for grid, move in moves} == {"F", "S", "G"}
    # In a cell with four ways none is preferred: neither those to the goal nor the others.
    open_cells = [
        move for grid, move in moves if not {cell_ahead(grid, other) for other in range(4)} & {"#", "H"}
    ]
    shares = np.bincount(open_cells, minlength=4) / len(open_cells)
    assert shares == pytest.approx([0.25] * 4, abs=0.06)


def test_a_small_share_of_the_moves_is_any_by_default(renderer: Renderer) -> None:
    moves = moves_of(renderer)
    lost = np.mean([cell_ahead(grid, move) in "#H" for grid, move in moves])
    assert 0.01 < lost < 0.05


@pytest.mark.parametrize("options", [{"random_moves": 1.5}, {"split": "held_out"}])
def test_impossible_options_are_refused(renderer: Renderer, options: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=next(iter(options))):
        next(demonstrations(renderer, seed=0, num_episodes=1, **options))


def test_an_unknown_option_is_refused(renderer: Renderer) -> None:
    with pytest.raises(ConfigError, match="unknown key 'sise'; did you mean 'size'"):
        next(demonstrations(renderer, seed=0, num_episodes=1, sise=4))


def test_best_moves_are_those_of_a_shortest_path() -> None:
    lake = ("SFFF", "HHHF", "FFFF", "FHHG")
    assert best_moves(lake, 0) == ("Right",)
    assert best_moves(lake, 3) == ("Down",)
    assert best_moves(lake, 8) == ("Right",)
    assert best_moves(lake, 12) == ("Up",)
    assert set(best_moves(("SFFF", "FFFF", "FFFF", "FFFG"), 0)) == {"Right", "Down"}
