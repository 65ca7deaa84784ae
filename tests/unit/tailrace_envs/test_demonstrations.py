"""Tokenizers and demonstrations of Sokoban and WebShop for tiny models, and baselines."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from transformers import AutoTokenizer

from tailrace.chat import Renderer
from tailrace.toolbox.byte_tokenizer import build_byte_tokenizer
from tailrace_envs import env_baselines, make_env
from tailrace_envs.baselines import success_of
from tailrace_envs.demonstrations import demonstrations_of
from tailrace_envs.sokoban.expert import SokobanNovice
from tailrace_envs.sokoban.expert import demonstrations as sokoban
from tailrace_envs.sokoban.tokenizer import build_sokoban_tokenizer
from tailrace_envs.webshop.config import CatalogueArgs
from tailrace_envs.webshop.expert import WebShopNovice
from tailrace_envs.webshop.expert import demonstrations as webshop
from tailrace_envs.webshop.goals import is_held_out_product
from tailrace_envs.webshop.shop import open_shop
from tailrace_envs.webshop.tokenizer import build_webshop_tokenizer
from tailrace_protos.weights import ModelCard

Row = tuple[list[int], list[int]]

SHOP: dict[str, Any] = {"items_per_page": 3, "max_turns": 8, "repeat_instruction": False}
LEVELS: dict[str, Any] = {"max_turns": 20, "num_boxes": 2}


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
    endings = [any(env.step(reply)[2:4]) for reply in replies(kind, row)]
    assert endings == [False] * (len(endings) - 1) + [True]


def test_demonstrations_are_valid_and_win_by_chance_alone(kind: Kind) -> None:
    env = make_env(kind.env_type, {**kind.options, "split": "train"})
    seeds = np.random.default_rng(3)
    (row,) = kind.rows(1, random_moves=0.0)
    env.reset(seed=int(seeds.integers(2**31)))
    assert not any(env.step(reply)[4]["invalid_action"] for reply in replies(kind, row))
    make = partial(make_env, kind.env_type, {**kind.options, "split": "train"})
    name = {"sokoban": "random legal", "webshop": "random"}[kind.env_type]
    chance = success_of({name: env_baselines(kind.env_type)[name]}, make, range(100))
    assert chance[name] < 0.2


def test_demonstrations_depend_on_the_seed_alone(kind: Kind) -> None:
    assert kind.rows(10) == kind.rows(10)
    assert kind.rows(10) != kind.rows(10, seed=4)


def test_every_sensible_reply_is_as_likely_as_another(kind: Kind) -> None:
    """The first replies on one task are uniform over what the novice calls sensible."""
    env = make_env(kind.env_type, {**kind.options, "split": "train"})
    novice: Any = SokobanNovice() if kind.env_type == "sokoban" else WebShopNovice()
    shares = []
    for seed in range(200):
        env.reset(seed=seed)
        choices = novice.sensible_replies(env)
        assert len(set(choices)) == len(choices)
        shares.append(1 / len(choices))
    said = [replies(kind, row)[0] for row in kind.rows(200, random_moves=0.0)]
    most = Counter(said).most_common(1)[0][1] / len(said)
    assert most < 2 * float(np.mean(shares))


def test_a_novice_buys_as_often_as_it_chooses_an_option() -> None:
    env: Any = make_env("webshop", {**SHOP, "split": "train"})
    env.reset(seed=0)
    env.step(f"search[{env.goal.product.title}]")
    env.step(f"click[{env.goal.product.asin}]")
    values = [f"click[{value}]" for some in env.goal.product.options.values() for value in some]
    said = Counter(WebShopNovice().sensible_replies(env))
    assert sum(said[one] for one in values) == said["click[buy now]"] == len(values)
    assert set(said) == set(WebShopNovice().any_replies(env))


@pytest.mark.parametrize("env_type", ["frozen_lake", "sokoban", "webshop"])
def test_baselines_are_repeatable_and_below_a_policy_that_knows_the_way(env_type: str) -> None:
    options = {"sokoban": LEVELS, "webshop": SHOP}.get(env_type, {})
    make = partial(make_env, env_type, {**options, "split": "held_out"})
    found = success_of(env_baselines(env_type), make, range(60))
    assert found == success_of(env_baselines(env_type), make, range(60))
    assert len(found) >= 3
    assert found["random"] <= min(found.values()) + 0.05
    assert max(found.values()) < 0.95
    on_train = success_of(env_baselines(env_type), partial(make_env, env_type, options), range(30))
    nearest = next(name for name in found if name.startswith("answer of the nearest train"))
    assert on_train[nearest] == 1.0  # its own answer


def test_an_environment_of_ones_own_has_its_baselines_as_an_attribute() -> None:
    assert set(env_baselines(f"{__name__}:Coin")) == {"heads"}
    assert success_of(env_baselines(f"{__name__}:Coin"), Coin, range(10)) == {"heads": 0.5}
    assert env_baselines("maths") == {}


class Coin:
    """Environment whose seed is even for heads; it reports no success."""

    baselines: ClassVar = {"heads": lambda env, random: "heads"}

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[str, dict[str, Any]]:
        self._seed = seed or 0
        return "heads or tails?", {}

    def step(self, action: str, /) -> tuple[str, float, bool, bool, dict[str, Any]]:
        return "", float((action == "heads") == (self._seed % 2 == 0)), True, False, {}

    def render(self) -> None:
        return None

    def close(self) -> None:
        return None


@pytest.mark.parametrize("options", [{"random_moves": 1.5}, {"split": "held_out"}])
def test_impossible_options_are_refused(kind: Kind, options: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=next(iter(options))):
        kind.rows(1, **options)


@pytest.mark.parametrize("room", [(6, 6), (8, 5), (7, 10)])
def test_whole_boards_of_sokoban_are_read_too(room: tuple[int, int], tmp_path: Path) -> None:
    kind = Kind("sokoban", build_sokoban_tokenizer, sokoban, LEVELS, tmp_path)
    env = make_env("sokoban", {"dim_room": room, "num_boxes": 1, "max_turns": 60, "split": "all"})
    for seed in range(30):
        board, _ = env.reset(seed=seed)
        token_ids = kind.tokenizer.encode(board)
        assert kind.tokenizer.unk_token_id not in token_ids
        assert kind.tokenizer.decode(token_ids) == board


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


def test_names_and_prices_of_held_out_products_consist_of_tokens_that_training_shows(
    tmp_path: Path,
) -> None:
    kind = Kind("webshop", build_webshop_tokenizer, webshop, SHOP, tmp_path)
    seen = {token for token_ids, _ in kind.rows(400) for token in token_ids}
    shop = open_shop(CatalogueArgs())
    hidden = [one for one in shop.products if is_held_out_product(one)]
    assert hidden
    for product in hidden:
        for text in (product.asin, f"${product.price:.2f}", product.title):
            assert seen.issuperset(kind.tokenizer.encode(text))
        said = kind.renderer.decode(kind.renderer.reply_ids(f"click[{product.asin}]"))
        assert said == f"click[ {product.asin} ]"


@pytest.mark.parametrize("history_turns", [0, 2])
def test_a_demonstrated_turn_has_the_prompt_of_a_policy_that_sees_few_turns(
    kind: Kind, history_turns: int
) -> None:
    """Rows of turns hold the replies of the whole episodes, each once, behind its last turns."""
    whole = [reply for row in kind.rows(5) for reply in replies(kind, row)]
    turns = kind.rows(5, history_turns=history_turns)
    assert [replies(kind, row) for row in turns] == [[reply] for reply in whole]
    begins = kind.renderer.observation_ids("", True)[:1].tolist()
    assert all(token_ids[:1] == begins for token_ids, _ in turns)
    users = [token_ids.count(begins[0]) for token_ids, _ in turns]
    assert max(users) == history_turns + 1
    assert users[: history_turns + 1] == list(range(1, history_turns + 2))
    with pytest.raises(ValueError, match="history_turns must not be negative"):
        kind.rows(1, history_turns=-1)


def test_the_task_stays_in_sight_of_a_demonstrated_turn(tmp_path: Path) -> None:
    kind = Kind("webshop", build_webshop_tokenizer, webshop, SHOP, tmp_path)
    wanted = kind.tokenizer.encode("i am looking for")[0]
    assert all(wanted in token_ids for token_ids, _ in kind.rows(5, history_turns=0))


def test_variants_are_demonstrated_in_turn(tmp_path: Path) -> None:
    kind = Kind("sokoban", build_sokoban_tokenizer, sokoban, LEVELS, tmp_path)
    rooms = [{"dim_room": (rows, 6)} for rows in (6, 7, 8)]
    shown = [
        kind.tokenizer.decode(token_ids).split("<|user|>")[1].count("#\n")
        for token_ids, _ in kind.rows(7, variants=rooms)
    ]
    assert shown == [6, 7, 8, 6, 7, 8, 6]
    with pytest.raises(ValueError, match="variants must name"):
        kind.rows(1, variants=[])
    with pytest.raises(ValueError, match="split"):
        kind.rows(1, variants=[{"split": "held_out"}])


class Riddle(Coin):
    """Environment with a question, and an answer in two replies; its `info` names no instructions."""

    def __init__(self, split: str) -> None:
        self._num_turns = 0

    def step(self, action: str, /) -> tuple[str, float, bool, bool, dict[str, Any]]:
        self._num_turns += 1
        return "go on", 0.0, self._num_turns == 2, False, {}


class RiddleNovice:
    """Novice that says anything."""

    def sensible_replies(self, env: Riddle) -> list[str]:
        return ["tails"]

    any_replies = sensible_replies


def test_a_first_observation_without_instructions_stays_in_sight_as_in_a_run(tmp_path: Path) -> None:
    folder = build_byte_tokenizer(tmp_path)
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    renderer = Renderer.from_model_card(ModelCard(config_json=b"{}", tokenizer_files=files))
    play = demonstrations_of(Riddle, RiddleNovice(), random_moves=0.0)
    _, (token_ids, mask) = play(renderer, seed=0, num_episodes=1, history_turns=0)
    seen = renderer.observation_ids("heads or tails?\ngo on", True).tolist()
    assert token_ids[: mask.index(1)] == seen
