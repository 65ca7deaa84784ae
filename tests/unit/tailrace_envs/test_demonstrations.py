"""Tokenizers and demonstrations of Sokoban and WebShop for tiny models."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer

from tailrace.chat import Renderer
from tailrace_envs import make_env
from tailrace_envs.sokoban.expert import demonstrations as sokoban
from tailrace_envs.sokoban.tokenizer import build_sokoban_tokenizer, row_tokens
from tailrace_envs.webshop.expert import demonstrations as webshop
from tailrace_envs.webshop.tokenizer import build_webshop_tokenizer
from tailrace_protos.weights import ModelCard

Row = tuple[list[int], list[int]]

SHOP: dict[str, Any] = {"items_per_page": 3, "max_turns": 8, "repeat_instruction": False}
LEVELS: dict[str, Any] = {"max_turns": 20}


class Kind:
    """Tokenizer with its demonstrations."""

    def __init__(
        self,
        env_type: str,
        build: Callable[[Path], Path],
        play: Callable[..., Iterator[Row]],
        options: dict[str, Any],
        folder: Path,
    ) -> None:
        self.env_type = env_type
        self.folder = build(folder)
        self._play = play
        self.options = options
        files = {path.name: path.read_bytes() for path in self.folder.iterdir()}
        self.renderer = Renderer.from_model_card(ModelCard(config_json=b"{}", tokenizer_files=files))
        self.renderer.require_plain_turns()
        self.tokenizer = AutoTokenizer.from_pretrained(self.folder)

    def rows(self, num_episodes: int, **options: Any) -> list[Row]:
        options = {"seed": 3, **self.options, **options}
        return list(self._play(self.renderer, num_episodes=num_episodes, **options))


@pytest.fixture(scope="module", params=["sokoban", "webshop"])
def kind(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Kind:
    folder = tmp_path_factory.mktemp(request.param)
    if request.param == "sokoban":
        return Kind("sokoban", build_sokoban_tokenizer, sokoban, LEVELS, folder)
    return Kind("webshop", build_webshop_tokenizer, webshop, SHOP, folder)


def test_nothing_that_occurs_is_unknown(kind: Kind) -> None:
    for token_ids, _ in kind.rows(60, random_moves=0.6):
        assert kind.tokenizer.unk_token_id not in token_ids


def test_the_chat_template_agrees_with_the_renderer(kind: Kind) -> None:
    env = make_env(kind.env_type, kind.options)
    first, _ = env.reset(seed=1)
    reply = "Left" if kind.env_type == "sokoban" else "search[red lamp]"
    second = env.step(reply)[0]
    messages = [
        {"role": "user", "content": first},
        {"role": "assistant", "content": reply},
        {"role": "user", "content": second},
    ]
    whole = kind.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    renderer = kind.renderer
    pieces = [
        renderer.observation_ids(first, True),
        renderer.reply_ids(reply),
        renderer.observation_ids(second, False),
    ]
    assert np.concatenate(pieces).tolist() == whole


def replies(kind: Kind, row: Row) -> list[str]:
    """Replies of a demonstration, as the environment gets them."""
    token_ids, mask = (np.array(part, dtype=np.int32) for part in row)
    edges = np.flatnonzero(np.diff(mask, prepend=0, append=0))
    parts = [token_ids[start:end] for start, end in edges.reshape(-1, 2)]
    return [kind.renderer.decode(part) for part in parts]


def test_demonstrations_play_back_as_they_were_shown(kind: Kind) -> None:
    env = make_env(kind.env_type, {**kind.options, "split": "train"})
    seeds = np.random.default_rng(3)
    seed = int(seeds.integers(2**31))
    row = kind.rows(1, random_moves=0.0)[0]
    env.reset(seed=seed)
    endings = [env.step(reply)[2:4] for reply in replies(kind, row)]
    assert endings == [(False, False)] * (len(endings) - 1) + [(True, False)]


def test_an_expert_without_random_moves_always_succeeds(kind: Kind) -> None:
    env = make_env(kind.env_type, kind.options)
    for row in kind.rows(30, random_moves=0.0):
        said = replies(kind, row)
        assert len(said) < kind.options["max_turns"]
        env.reset(seed=0)
        assert not env.step(said[0])[4]["invalid_action"]


def test_demonstrations_depend_on_the_seed_alone(kind: Kind) -> None:
    assert kind.rows(10) == kind.rows(10)
    assert kind.rows(10) != kind.rows(10, seed=4)


def test_random_moves_are_a_share_of_all(kind: Kind) -> None:
    def mean_turns(random_moves: float) -> float:
        return float(
            np.mean([len(replies(kind, row)) for row in kind.rows(60, random_moves=random_moves)])
        )

    assert kind.rows(10, random_moves=0.0) != kind.rows(10, random_moves=0.5)
    if kind.env_type == "sokoban":  # shopping at random ends soon with a purchase
        assert mean_turns(0.0) < mean_turns(0.5) < mean_turns(1.0)


@pytest.mark.parametrize("options", [{"random_moves": 1.5}, {"split": "held_out"}])
def test_impossible_options_are_refused(kind: Kind, options: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=next(iter(options))):
        kind.rows(1, **options)


def test_a_turn_of_sokoban_is_a_token_per_row_and_one_per_move(tmp_path: Path) -> None:
    kind = Kind("sokoban", build_sokoban_tokenizer, sokoban, LEVELS, tmp_path)
    env = make_env("sokoban", LEVELS)
    for seed in range(50):
        observation, _ = env.reset(seed=seed)
        assert len(kind.renderer.observation_ids(observation, True)) == 6 + 2
        assert set(row_tokens()).issuperset(observation.splitlines(keepends=True))
    assert {len(kind.renderer.reply_ids(word)) for word in ("Up", "Down", "Left", "Right")} == {2}
    larger, _ = make_env("sokoban", {"dim_room": [7, 8], "num_boxes": 2, "max_turns": 60}).reset(seed=0)
    assert kind.tokenizer.decode(kind.tokenizer.encode(larger)) == larger


def test_a_decoded_action_of_webshop_does_what_the_text_does(tmp_path: Path) -> None:
    kind = Kind("webshop", build_webshop_tokenizer, webshop, SHOP, tmp_path)
    said = kind.renderer.decode(kind.renderer.reply_ids("search[steel lamp]"))
    assert said == "search[ steel lamp ]"
    pages = []
    for reply in ("search[steel lamp]", said):
        env = make_env("webshop", SHOP)
        env.reset(seed=0)
        pages.append(env.step(reply)[0])
    assert pages[0] == pages[1]
    assert pages[0].startswith("Page 1")
