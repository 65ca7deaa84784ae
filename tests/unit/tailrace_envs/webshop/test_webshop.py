"""WebShop: actions, pages, search and goals."""

from __future__ import annotations

import math
from collections import Counter

import pytest

from tailrace.config import ConfigError
from tailrace_envs import make_env
from tailrace_envs.webshop.catalogue import Product
from tailrace_envs.webshop.environment import INVALID_NOTE, RULES, WebShopText
from tailrace_envs.webshop.expert import direct_action
from tailrace_envs.webshop.generated import KINDS, generate_products
from tailrace_envs.webshop.goals import make_goals
from tailrace_envs.webshop.shop import SearchIndex

PAGES = {"items_per_page": 3}


def test_a_trip_from_the_search_to_the_purchase() -> None:
    env = WebShopText(**PAGES)
    observation, _ = env.reset(seed=5)
    wish = f"Instruction: {env.goal.instruction}\n"
    assert observation == wish + "Available actions: search[words]\n"
    product = env.goal.product
    found, reward, *_ = env.step(f"search[{product.title}]")
    assert found.startswith(f"{wish}Page 1 of ")
    assert f"{product.asin}: {product.title} ${product.price:.2f}\n" in found
    assert reward == 0.0
    item, *_ = env.step(f"I choose click[{product.asin.upper()}]")
    for name, values in product.options.items():
        assert f"{name}: {' / '.join(values)}\n" in item
    for name, value in env.goal.options:
        chosen, *_ = env.step(f"click[{value}]")
        assert f" chosen {value}\n" in chosen
        assert f"\n{name}: " in chosen
    _, reward, terminated, truncated, info = env.step("click[buy now]")
    assert (reward, terminated, truncated) == (1.0, True, False)
    assert info["success"] == 1.0
    assert info["option_score"] == info["attribute_score"] == info["price_score"] == 1.0


def test_results_are_leafed_through() -> None:
    env = WebShopText(items_per_page=2, max_results=5)
    env.reset(seed=0)
    first, *_ = env.step("search[lamp chair table]")
    assert "Page 1 of 3 (5 results)" in first
    assert "next >" in first
    assert "< prev" not in first
    env.step("click[next >]")
    last, *_ = env.step("click[next >]")
    assert "Page 3 of 3" in last
    assert "next >" not in last
    assert len(env.page.shown(2)) == 1
    assert env.step("click[< prev]")[0].count("Page 2 of 3") == 1


def test_details_are_read_and_left_again() -> None:
    env = WebShopText(**PAGES)
    env.reset(seed=1)
    env.step(f"search[{env.goal.product.query}]")
    shown = env.page.shown(3)[0]
    env.step(f"click[{shown.asin}]")
    value = next(iter(shown.options.values()))[0]
    env.step(f"click[{value}]")
    for detail, text in (("description", shown.description), ("features", shown.features[0])):
        page, *_ = env.step(f"click[{detail}]")
        assert f"{detail}:\n{text}\n" in page
        item, *_ = env.step("click[< prev]")
        assert f"chosen {value}" in item
    results, *_ = env.step("click[< prev]")
    assert "Page 1 of" in results
    start, *_ = env.step("click[back to search]")
    assert start.endswith("search[words]\n")


@pytest.mark.parametrize(
    "reply", ["buy it", "click[buy now]", "search[]", "click[b000]", "search", "", "click[search]"]
)
def test_what_the_first_page_does_not_offer_is_invalid(reply: str) -> None:
    env = WebShopText(invalid_action_penalty=0.1)
    before, _ = env.reset(seed=0)
    observation, reward, *_, info = env.step(reply)
    assert (observation, reward) == (INVALID_NOTE + before, -0.1)
    assert info["invalid_action"] is True


def test_searching_needs_the_page_with_the_search_box() -> None:
    env = WebShopText()
    env.reset(seed=0)
    env.step("search[lamp]")
    assert env.step("search[chair]")[4]["invalid_action"] is True


def test_the_limit_of_turns_ends_it_with_nothing_bought() -> None:
    env = WebShopText(max_turns=2)
    env.reset(seed=0)
    env.step("search[lamp]")
    _, reward, terminated, truncated, info = env.step("click[back to search]")
    assert (reward, terminated, truncated, info["success"]) == (0.0, False, True, 0.0)


def test_the_instruction_stands_on_every_page_or_on_the_first_alone() -> None:
    for repeats in (True, False):
        env = WebShopText(repeat_instruction=repeats)
        assert "Instruction:" in env.reset(seed=0)[0]
        assert ("Instruction:" in env.step("search[lamp]")[0]) is repeats
    assert WebShopText(instructions=True).reset(seed=0)[0].startswith(RULES)


def test_another_choice_of_an_option_replaces_the_first() -> None:
    env = WebShopText()
    env.reset(seed=2)
    product = env.goal.product
    env.step(f"search[{product.title}]")
    env.step(f"click[{product.asin}]")
    name, values = next(iter(product.options.items()))
    for value in values:
        env.step(f"click[{value}]")
    assert env.page.chosen == {name: values[-1]}


def test_an_exponent_makes_a_part_of_the_goal_worth_less_and_all_of_it_as_much() -> None:
    for chooses, score in ((False, 0.6), (True, 1.0)):
        env = WebShopText(reward_exponent=3.0)
        env.reset(seed=2)
        product = env.goal.product
        options = [f"click[{value}]" for value in env.goal.values] if chooses else []
        for reply in (f"search[{product.title}]", f"click[{product.asin}]", *options):
            env.step(reply)
        _, reward, terminated, _, info = env.step("click[buy now]")
        assert terminated
        assert (reward, info["success"]) == (pytest.approx(score**3), float(chooses))
    with pytest.raises(ConfigError, match="reward_exponent must be positive"):
        WebShopText(reward_exponent=0.0)


def test_the_direct_way_fulfils_every_goal() -> None:
    for split in ("train", "held_out"):
        env = WebShopText(split=split, **PAGES)
        for seed in range(len(env.shop.goals_of(split))):
            env.reset(seed=seed)
            done, reward = False, 0.0
            while not done:
                _, reward, terminated, truncated, _ = env.step(direct_action(env, env.goal))
                done = terminated or truncated
            assert reward == 1.0


def test_consecutive_seeds_ask_for_all_goals_and_held_out_ones_are_never_trained() -> None:
    envs = {split: WebShopText(split=split) for split in ("train", "held_out", "all")}
    goals = {}
    for split, env in envs.items():
        num_goals = len(env.shop.goals_of(env.config.split))
        goals[split] = {
            env.shop.goal_for_seed(env.config.split, seed).digest for seed in range(num_goals)
        }
        assert len(goals[split]) == num_goals
    assert goals["train"].isdisjoint(goals["held_out"])
    assert goals["train"] | goals["held_out"] == goals["all"]
    assert 0.1 < len(goals["held_out"]) / len(goals["all"]) < 0.4


def test_held_out_goals_are_of_products_that_training_never_shows() -> None:
    shop = WebShopText().shop
    titles = {one.product.title for one in shop.goals_of("held_out")}
    assert titles.isdisjoint(one.product.title for one in shop.goals_of("train"))
    shown = {
        split: {one.title for kind in KINDS for one in shop.find(kind.query, 99, split)}
        for split in ("train", "held_out")
    }
    assert titles.isdisjoint(shown["train"])
    assert titles <= shown["held_out"]
    env = WebShopText()
    env.reset(seed=0)
    page, *_ = env.step(f"search[{next(iter(titles))}]")
    assert "\nPage 1" in page
    assert not any(f": {title} " in page for title in titles)


def test_a_catalogue_depends_on_number_and_seed_alone() -> None:
    products = generate_products(30, 4)
    assert products == generate_products.__wrapped__(30, 4)
    assert products != generate_products(30, 5)
    assert products[:10] == generate_products(10, 4)
    assert {product.query for product in products} == {kind.query for kind in KINDS}


def test_price_limits_follow_the_seed_and_never_exclude_the_product() -> None:
    products = generate_products(20, 0)
    limits = [
        [goal.max_price for goal in make_goals(products, seed, only_given=False)] for seed in (1, 2)
    ]
    assert limits[0] != limits[1]
    for goal in make_goals(products, 1, only_given=False):
        assert goal.product.price < goal.max_price <= goal.product.price + 40
        assert f"{goal.max_price:.2f} dollars" in goal.instruction


@pytest.mark.parametrize(
    ("price", "shares"),
    [
        # The upper of two of 20, 30, 40, 50: one pair of six has 30, two have 40, three have 50.
        (10.0, {30.0: 1 / 6, 40.0: 2 / 6, 50.0: 3 / 6}),
        (9.99, {20.0: 1 / 6, 30.0: 2 / 6, 40.0: 3 / 6}),
        (965.0, {980.0: 1 / 3, 990.0: 2 / 3}),
        (975.0, {990.0: 1.0}),
        (980.0, {math.inf: 1.0}),  # 990 alone is above it: no limit
        (5000.0, {math.inf: 1.0}),
    ],
)
def test_price_limits_are_drawn_as_published(price: float, shares: dict[float, float]) -> None:
    products = [
        Product(asin=f"a{number}", title="t", price=price, query="q", attributes=("y",))
        for number in range(3000)
    ]
    goals = make_goals(products, 0, only_given=False)
    counts = Counter(goal.max_price for goal in goals)
    assert counts.keys() == shares.keys()
    for limit, share in shares.items():
        assert counts[limit] / len(goals) == pytest.approx(share, abs=0.03)
    for goal in goals:
        assert ("price lower than" in goal.instruction) is (goal.max_price < math.inf)


def test_the_search_finds_the_best_match_first_and_breaks_ties_by_place() -> None:
    index = SearchIndex(["red lamp", "blue lamp", "red chair", "red lamp"])
    assert index.find("Red LAMP") == [0, 3, 1, 2]
    assert index.find("chair") == [2]
    assert index.find("red") == [0, 2, 3]
    assert index.find("sofa ???") == []


def test_a_search_without_results_shows_an_empty_page() -> None:
    env = WebShopText()
    env.reset(seed=0)
    page, *_ = env.step("search[zeppelin]")
    assert "Page 1 of 1 (0 results)\nAvailable actions: click[back to search]\n" in page


def test_frames_are_texts() -> None:
    env = WebShopText()
    env.reset(seed=0)
    env.step("search[lamp]")
    assert env.render().startswith("> search[lamp]\n\nInstruction: ")


@pytest.mark.parametrize(
    ("env_config", "named"),
    [
        ({"max_turns": 0}, "max_turns"),
        ({"items_per_page": 0}, "items_per_page"),
        ({"max_results": 0}, "max_results"),
        ({"invalid_action_penalty": -1.0}, "invalid_action_penalty"),
        ({"split": "dev"}, "split"),
        ({"catalogue": {"num_products": 0}}, "num_products"),
        ({"catalogue": {"path": "shop.csv"}}, "catalogue.path"),
        ({"catalogue": {"human_path": "a.json"}}, "human_path"),
        ({"catalogue": {"path": "no/such.jsonl"}}, r"catalogue.path: cannot read no/such.jsonl"),
        ({"catalogue": {"paths": "a.jsonl"}}, "did you mean 'path'"),
    ],
)
def test_what_cannot_be_is_refused_with_its_key(env_config: dict[str, object], named: str) -> None:
    with pytest.raises(ValueError, match=named) as caught:
        make_env("webshop", env_config)
    assert isinstance(caught.value, ConfigError)
