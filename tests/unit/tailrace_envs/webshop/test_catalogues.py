"""Catalogues from files: our format and the published one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tailrace.config import ConfigError
from tailrace_envs import make_env
from tailrace_envs.webshop.catalogue import Instruction, Product, read_catalogue
from tailrace_envs.webshop.environment import WebShopText
from tailrace_envs.webshop.generated import NUM_TITLES, generate_products
from tailrace_envs.webshop.goals import MAX_COMBINATIONS, is_held_out_product, make_goals
from tailrace_envs.webshop.public import UNKNOWN_PRICE, price_of
from tailrace_envs.webshop.shop import words_of
from tests.unit.tailrace_envs.webshop.catalogues import write_catalogue

PUBLISHED: list[dict[str, Any]] = [
    {
        "asin": "B0ABCDEFG1",
        "name": "Acme Soft Cotton Shirt",
        "category": "fashion",
        "query": "Shirts ",
        "product_category": "Clothing › Men › Shirts",
        "pricing": "$1,012.50$1,020.00",
        "customization_options": {
            "Color": [{"value": " Red/White ", "is_selected": True, "url": None}, {"value": "Blue"}],
            "Size": None,
        },
        "small_description": ["Machine washable", "Soft"],
        "full_description": "A shirt.",
        "images": ["x.jpg"],
    },
    {
        "asin": "B0ABCDEFG2",
        "name": "Plain Mug",
        "category": "kitchen",
        "query": "mugs",
        "product_category": "Kitchen › Mugs",
        "pricing": None,
        "customization_options": {},
        "small_description": "Holds tea",
        "full_description": None,
    },
    {"asin": "nan", "name": "no id"},
    {"asin": "B0ABCDEFG2", "name": "again"},
]
NOTES = {
    "B0ABCDEFG1": {
        "attributes": ["machine wash", "soft cotton"],
        "instruction": "Find me a soft cotton shirt.",
        "instruction_attributes": ["soft cotton"],
    }
}
WISHES = {
    "B0ABCDEFG2": [
        {
            "instruction": "i want a plain mug, in white.",
            "instruction_attributes": ["plain"],
            "instruction_options": ["white"],
        },
        {"instruction": "nothing special", "instruction_attributes": [], "instruction_options": []},
    ],
    "B0ABCDEFG1": [
        {
            "instruction": "a shirt, any colour will do",
            "instruction_attributes": ["soft cotton"],
            "instruction_options": nothing,
        }
        for nothing in ([], {}, None)
    ],
}


@pytest.fixture
def published(tmp_path: Path) -> dict[str, str]:
    files = {
        "path": ("items_shuffle.json", PUBLISHED),
        "attributes_path": ("items_ins_v2.json", NOTES),
        "human_path": ("items_human_ins.json", WISHES),
    }
    for name, content in files.values():
        (tmp_path / name).write_text(json.dumps(content))
    return {key: str(tmp_path / name) for key, (name, _) in files.items()}


def test_published_products_are_read_with_attributes_and_instructions(
    published: dict[str, str],
) -> None:
    catalogue = {**published, "human_path": "", "num_products": 0}
    shop = WebShopText(catalogue=catalogue, split="all").shop
    shirt, mug = shop.products
    assert (shirt.asin, shirt.price, shirt.query) == ("b0abcdefg1", 1012.5, "shirts")
    assert shirt.options == {"color": ("red | white", "blue")}
    assert shirt.attributes == ("machine wash", "soft cotton")
    assert (mug.price, mug.features, mug.attributes) == (UNKNOWN_PRICE, ("Holds tea",), ())
    goals = shop.goals_of("all")
    assert {goal.values for goal in goals} == {("red | white",), ("blue",)}
    wish = next(goal for goal in goals if goal.values == ("blue",))
    assert wish.instruction == "Find me a soft cotton shirt with color: blue"  # no limit above 990


def test_what_people_wrote_are_the_only_goals_when_it_is_given(published: dict[str, str]) -> None:
    shop = WebShopText(catalogue={**published, "num_products": 0}, split="all").shop
    (goal,) = (one for one in shop.goals_of("all") if one.product.asin == "b0abcdefg2")
    assert goal.instruction.startswith("i want a plain mug, in white, and price lower than 1")
    assert goal.values == ("white",)


def test_a_wish_that_names_no_option_wants_none_of_a_product_that_has_some(
    published: dict[str, str],
) -> None:
    env = WebShopText(catalogue={**published, "num_products": 0}, split="all")
    goals = [goal for goal in env.shop.goals_of("all") if goal.product.asin == "b0abcdefg1"]
    assert [goal.instruction for goal in goals] == ["a shirt, any colour will do"] * 3
    assert [goal.options for goal in goals] == [()] * 3
    env.reset(seed=env.shop.goals_of("all").index(goals[0]))
    env.step("search[cotton shirt]")
    env.step("click[b0abcdefg1]")
    _, reward, _, _, info = env.step("click[buy now]")
    assert (reward, info["success"]) == (1.0, 1.0)  # one attribute and the price, of two


@pytest.mark.parametrize(
    ("options", "values"),
    [("", [("blue",), ("red",)]), (', "options": {}', [()]), (', "options": {"c": "red"}', [("red",)])],
)
def test_in_our_format_options_left_out_are_open_and_none_are_none(
    tmp_path: Path, options: str, values: list[tuple[str, ...]]
) -> None:
    wish = f'{{"text": "a thing", "attributes": ["fine"]{options}}}'
    path = tmp_path / "shop.jsonl"
    path.write_text(
        '{"asin": "a", "title": "b", "price": 1, "options": {"c": ["red", "blue"]}, '
        f'"instructions": [{wish}]}}\n'
    )
    goals = WebShopText(catalogue={"path": str(path)}, split="all").shop.goals_of("all")
    assert sorted(goal.values for goal in goals) == values
    (product,) = products = read_catalogue(path)
    write_catalogue(path, products)
    assert read_catalogue(path) == (product,)


def test_published_products_without_an_instruction_are_no_goals(tmp_path: Path) -> None:
    path, notes = tmp_path / "items.json", tmp_path / "notes.json"
    path.write_text(json.dumps(PUBLISHED[:2]))
    notes.write_text(
        json.dumps({**NOTES, "B0ABCDEFG2": {"attributes": ["plain"], "instruction": None}})
    )
    shop = WebShopText(catalogue={"path": str(path), "attributes_path": str(notes)}, split="all").shop
    assert {goal.product.asin for goal in shop.goals_of("all")} == {"b0abcdefg1"}


def test_a_part_of_a_published_file_is_counted_with_what_is_left_out(tmp_path: Path) -> None:
    path, notes = tmp_path / "items.json", tmp_path / "notes.json"
    path.write_text(json.dumps([PUBLISHED[2], *PUBLISHED[:2]]))
    notes.write_text(json.dumps(NOTES))
    catalogue = {"path": str(path), "attributes_path": str(notes), "num_products": 2}
    shop = WebShopText(catalogue=catalogue, split="all").shop
    assert [product.asin for product in shop.products] == ["b0abcdefg1"]


def test_a_catalogue_without_a_word_is_refused_with_file_and_remedy(tmp_path: Path) -> None:
    path = tmp_path / "shop.jsonl"
    write_catalogue(path, [Product(asin="a", title="***", price=1.0, query="x", attributes=("y",))])
    with pytest.raises(ConfigError, match=rf"{path} has a word to search for: give titles or desc"):
        make_env("webshop", {"catalogue": {"path": str(path)}, "split": "all"})


def test_the_search_reads_what_pages_show_and_not_what_rewards_are_made_of() -> None:
    product = Product(
        asin="a",
        title="Lamp",
        price=1.0,
        query="hiddenquery",
        attributes=("hiddenattribute",),
        description="For desks.",
        features=("Dimmable", "second"),
        options={"color": ("red", "blue")},
        reviews=("hiddenreview",),
    )
    assert product.text == "Lamp For desks. Dimmable color red blue"


def test_everything_asked_for_of_a_generated_product_can_be_searched_for() -> None:
    for product in generate_products(48, 0):
        words = set(product.text.split())
        assert words >= {product.query, *product.attributes}
        assert words.issuperset(value for values in product.options.values() for value in values)


def test_generated_products_have_distinct_titles_until_all_are_used() -> None:
    titles = [product.title for product in generate_products(NUM_TITLES + 1, 0)]
    assert len({*titles[:NUM_TITLES]}) == NUM_TITLES
    assert titles[NUM_TITLES] == titles[0]
    assert [one.title for one in generate_products(NUM_TITLES, 1)] != titles[:NUM_TITLES]


def test_each_word_of_a_held_out_product_occurs_in_training_in_another_product() -> None:
    products = generate_products(144, 0)
    known = {word for one in products if not is_held_out_product(one) for word in words_of(one.text)}
    hidden = [one for one in products if is_held_out_product(one)]
    assert len(hidden) > 20
    assert all(known.issuperset(words_of(one.text)) for one in hidden)


def test_a_bought_published_product_scores(published: dict[str, str]) -> None:
    env = make_env("webshop", {"catalogue": {**published, "human_path": ""}, "split": "all"})
    env.reset(seed=0)
    env.step("search[cotton shirt]")
    env.step("click[B0ABCDEFG1]")
    env.step(f"click[{env.goal.values[0]}]")  # type: ignore[attr-defined]
    assert env.step("click[buy now]")[1] == 1.0


def test_a_part_of_a_published_file_may_do(published: dict[str, str]) -> None:
    catalogue = {**published, "human_path": "", "num_products": 1}
    assert len(WebShopText(catalogue=catalogue, split="all").shop.products) == 1


@pytest.mark.parametrize(
    ("pricing", "price"),
    [("$12.99", 12.99), ("$10.00$20.00", 10.0), ("$1,234.50", 1234.5), ("", UNKNOWN_PRICE)],
)
def test_prices_are_read(pricing: str, price: float) -> None:
    assert price_of(pricing) == price


def test_our_format_keeps_every_field(tmp_path: Path) -> None:
    wish = Instruction("i need a thing", ("sturdy",), {"color": "red"})
    own = Product(
        asin="x1",
        title="thing",
        price=3.5,
        options={"color": ("red",)},
        rating=4.0,
        instructions=(wish,),
    )
    products = (*generate_products(5, 1), own)
    path = tmp_path / "shop.jsonl"
    write_catalogue(path, products)
    assert read_catalogue(path) == products
    assert read_catalogue(path, 2) == products[:2]
    env = WebShopText(catalogue={"path": str(path), "num_products": 0}, split="all")
    assert any(
        goal.instruction.startswith("i need a thing, and price") for goal in env.shop.goals_of("all")
    )


def test_a_product_of_many_options_has_goals_with_every_value_of_each() -> None:
    options = {name: tuple(f"{name}{number}" for number in range(8)) for name in "abc"}
    one = Product(asin="x", title="t", price=1.0, query="q", attributes=("y",), options=options)
    goals, same, others = (make_goals([one], seed, only_given=False) for seed in (0, 0, 1))
    assert len({goal.options for goal in goals}) == MAX_COMBINATIONS
    assert goals == same
    assert {goal.options for goal in goals} != {goal.options for goal in others}
    for place in range(3):  # 24 draws of 8 values: the first 24 combinations would all have a0
        assert len({goal.values[place] for goal in goals}) >= 6


def test_values_that_a_catalogue_repeats_are_one_goal() -> None:
    one = Product(
        asin="x", title="t", price=1.0, query="q", attributes=("y",), options={"c": ("red",) * 30}
    )
    (goal,) = make_goals([one], 0, only_given=False)
    assert goal.values == ("red",)


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ('{"asin": "a", "title": "b"}', r":2: is no product: .*price"),
        ("{", r":2: is no product"),
        ('{"asin": "ok", "title": "b", "price": 1}', r":2: asin 'ok' occurs twice"),
    ],
)
def test_a_line_that_is_no_product_is_named(tmp_path: Path, line: str, named: str) -> None:
    path = tmp_path / "shop.jsonl"
    path.write_text(f'{{"asin": "ok", "title": "b", "price": 1}}\n{line}\n')
    with pytest.raises(ConfigError, match=named):
        make_env("webshop", {"catalogue": {"path": str(path)}})


@pytest.mark.parametrize(
    ("content", "named"),
    [
        ('{"a": 1}', r"must hold a list"),
        ("[", r"is not valid JSON"),
        ("[]", r"holds no product"),
        ('[{"name": "x"}]', r"\[0\]: a product must be an object with 'asin'"),
        ('[{"asin": "a"}]', r"\[0\]: product a cannot be read \(KeyError: 'name'\)"),
    ],
)
def test_a_published_file_that_is_none_is_named(tmp_path: Path, content: str, named: str) -> None:
    path = tmp_path / "items.json"
    path.write_text(content)
    with pytest.raises(ConfigError, match=named):
        make_env("webshop", {"catalogue": {"path": str(path)}})


def test_a_catalogue_that_gives_no_goals_is_refused_with_the_remedy(tmp_path: Path) -> None:
    path = tmp_path / "shop.jsonl"
    write_catalogue(path, [Product(asin="a", title="b", price=1.0)])
    with pytest.raises(ConfigError, match=r"has no train goal \(0 in all\): give products attributes"):
        make_env("webshop", {"catalogue": {"path": str(path)}})


def test_an_option_value_with_a_bar_can_be_told_from_two_values(published: dict[str, str]) -> None:
    env = WebShopText(catalogue={**published, "human_path": "", "num_products": 0}, split="all")
    env.reset(seed=0)
    env.step("search[shirt]")
    item, *_ = env.step("click[b0abcdefg1]")
    assert "color: red | white / blue\n" in item
    assert env.step("click[red | white]")[4]["invalid_action"] is False
    assert env.page.chosen == {"color": "red | white"}
