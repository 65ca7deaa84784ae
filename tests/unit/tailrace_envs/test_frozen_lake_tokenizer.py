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
from tailrace_envs.frozen_lake_tokenizer import build_frozen_lake_tokenizer, row_tokens
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


def test_without_random_moves_every_demonstration_reaches_the_goal(renderer: Renderer) -> None:
    for token_ids, _ in demonstrations(renderer, seed=0, num_episodes=50, random_moves=0.0):
        last_reply = renderer.decode(np.array(token_ids[-2:], dtype=np.int32))
        rows = renderer.decode(np.array(token_ids[-8:-2], dtype=np.int32)).splitlines()
        beside_goal = {1: (2, 3), 2: (3, 2)}[parse_action(last_reply) or 0]
        assert rows[beside_goal[0]][beside_goal[1]] == "P"


def test_half_of_the_moves_are_random_by_default(renderer: Renderer) -> None:
    rows = list(demonstrations(renderer, seed=0, num_episodes=300))
    moves = sum(sum(mask) // 2 for _, mask in rows)
    wasted = sum(
        parse_action(renderer.decode(np.array(ids[at + TURN : at + 8], dtype=np.int32))) in (0, 3)
        for ids, _ in rows
        for at in range(0, len(ids), 8)
    )
    # A quarter of all moves by chance goes left or up; shortest paths on these maps seldom do.
    assert 0.2 < wasted / moves < 0.35


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
