"""Actions in replies: every name on a page can be clicked, whatever the name."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tailrace_envs.webshop.catalogue import Instruction, Product
from tailrace_envs.webshop.environment import Action, WebShopText, normalized, read_action
from tailrace_envs.webshop.pages import BACK, BUY, DETAILS, NEXT, PREVIOUS, Page
from tests.unit.tailrace_envs.webshop.catalogues import write_catalogue

NAMES = ("red", "Red", "red  |  white", "[2 Pack] Blue", "x", "x] y", "a]", "")
BUTTONS = {BACK, NEXT, PREVIOUS, BUY, *DETAILS}


@pytest.mark.parametrize(
    ("reply", "name"),
    [
        ("click[red]", "red"),
        ("click[Red]", "Red"),
        ("click[RED]", "red"),
        ("Click [ red ]", "red"),
        ("click[red | white]", "red  |  white"),
        ("I take click[[2 pack]  blue], the set", "[2 Pack] Blue"),
        ("click[x] y]", "x] y"),
        ("click[x] and click[red]", "x"),
        ("click[a]]", "a]"),
        ("click[]", ""),
        ("click[blue] or click[red]", None),  # the first action counts
        ("click[red", None),
        ("click[red|white]", None),
        ("unclick[red]", None),
        ("click[re]", None),
    ],
)
def test_a_click_is_the_name_up_to_its_closing_bracket(reply: str, name: str | None) -> None:
    assert read_action(reply, NAMES) == (None if name is None else Action("click", name))


@pytest.mark.parametrize(
    ("reply", "words"),
    [
        ("search[Desk  LAMP]", "desk lamp"),
        ("search[lamp] then click[b1]", "lamp"),
        ("search[[2 pack] lamp], please", "[2 pack] lamp"),
        ("search[lamp [red] then click[b1]", "lamp [red"),
        ("search[ ]", None),
        ("search[lamp", None),
    ],
)
def test_a_search_ends_with_its_bracket_and_pairs_may_stand_within(
    reply: str, words: str | None
) -> None:
    assert read_action(reply, ()) == (None if words is None else Action("search", words))


nasty = st.one_of(
    st.sampled_from(
        [
            *NAMES,
            *BUTTONS,
            "Buy Now",
            "NEXT >",
            "click[x]",
            "search[x]",
            "]",
            "[",
            "[]",
            " a ",
            "\n",
            "İ",
        ]
    ),
    st.text(st.sampled_from("aAβΣ1 []|<>\t\n"), max_size=6),
)
asins = nasty.filter(lambda name: normalized(name) not in BUTTONS)
catalogues = st.lists(
    st.builds(
        Product,
        asin=asins,
        title=st.just("lamp"),
        price=st.just(1.0),
        options=st.dictionaries(nasty, st.lists(nasty, max_size=4).map(tuple), max_size=3),
    ),
    min_size=1,
    max_size=5,
    unique_by=lambda product: product.asin,
)


@settings(max_examples=150, deadline=None)
@given(products=catalogues, per_page=st.integers(1, 3), tail=st.sampled_from(["", " thanks", " ok ["]))
def test_every_name_that_a_page_offers_is_clickable(
    products: list[Product], per_page: int, tail: str
) -> None:
    pages = [Page("results", tuple(products))]
    seen: list[Page] = []
    while pages and len(seen) < 60:
        page = pages.pop(0)
        seen.append(page)
        names = page.clicks(per_page)
        assert len(set(names)) == len(names)
        for name in names:
            assert read_action(f"click[{name}]{tail}", names) == Action("click", name)
            assert read_action(f"CLICK[{name}]", names) == Action("click", name)
            there = page.clicked(name)
            if page.kind == "results" and name not in BUTTONS:
                assert there.item is not None
                assert there.item.asin == name
            if page.kind == "item" and name not in BUTTONS - {NEXT}:
                assert name in there.chosen.values()
            if there not in seen and there not in pages:
                pages.append(there)


def test_a_goal_in_capitals_brackets_and_blanks_reaches_reward_one(tmp_path: Path) -> None:
    values = {"Color": ("Red", "[2 Pack] Blue"), "Size": ("XL  |  Long", "S")}
    wish = Instruction(
        "A Lamp", ("Machine Washable",), {"Color": "[2 Pack] Blue", "Size": "XL  |  Long"}
    )
    path = tmp_path / "shop.jsonl"
    product = Product(
        asin="B1",
        title="Brass LAMP",
        price=25.0,
        options=values,
        features=("is Machine washable",),
        instructions=(wish,),
    )
    write_catalogue(path, [product])
    for as_written in (True, False):
        env = WebShopText(catalogue={"path": str(path)}, split="all")
        env.reset(seed=0)
        for name in ("B1", *(wish.options or {}).values()):
            reply = f"click[{name if as_written else normalized(name)}]"
            if name == "B1":
                env.step("search[lamp]")
            assert env.step(reply)[4]["invalid_action"] is False, reply
        assert env.step("click[buy now]")[1] == 1.0
