"""Catalogues from files: ours, and the published data's form."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tailrace.config import ConfigError
from tailrace.envs import make_env
from tailrace.envs.webshop.catalogue import Instruction, Product, read_catalogue, write_catalogue
from tailrace.envs.webshop.environment import WebShopText
from tailrace.envs.webshop.generated import generate_products
from tailrace.envs.webshop.public import UNKNOWN_PRICE, price_of

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
    ]
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
    assert wish.instruction.startswith(
        "Find me a soft cotton shirt with color: blue, and price lower than 10"
    )


def test_what_people_wrote_are_the_only_goals_when_it_is_given(published: dict[str, str]) -> None:
    shop = WebShopText(catalogue={**published, "num_products": 0}, split="all").shop
    (goal,) = shop.goals_of("all")
    assert goal.product.asin == "b0abcdefg2"
    assert goal.instruction.startswith("i want a plain mug, in white, and price lower than 1")
    assert goal.values == ("white",)


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
