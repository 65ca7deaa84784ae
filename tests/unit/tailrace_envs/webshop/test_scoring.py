"""Published reward, on examples computed by hand."""

from __future__ import annotations

import pytest
from rapidfuzz import fuzz

from tailrace_envs.webshop.catalogue import Product
from tailrace_envs.webshop.goals import Goal
from tailrace_envs.webshop.scoring import (
    COLOURS,
    base_colour,
    is_similar,
    score,
    score_type,
    title_words,
)

LAMP = Product(
    asin="a1",
    title="Acme brass desk lamp with dimmer",  # acme, brass, desk, lamp, dimmer
    price=25.0,
    query="desk lamp",
    product_category="home › lighting › lamps",
    options={"color": ("red", "navy blue"), "size": ("small", "large")},
    attributes=("easy assemble", "energy saving"),
    features=("Comes with a spare bulb",),
)
GOAL = Goal(
    LAMP, "", ("easy assemble", "spare bulb"), (("color", "navy blue"), ("size", "small")), 30.0
)


def other(**changes: object) -> Product:
    values = {name: getattr(LAMP, name) for name in LAMP.__struct_fields__}
    return Product(**{**values, "asin": "a2", **changes})


def test_the_wanted_product_with_its_options_scores_one() -> None:
    assert score(GOAL, LAMP, ["navy blue", "small"]) == (1.0, 1.0, 1.0, 1.0, 1.0)


@pytest.mark.parametrize(
    ("chosen", "reward"),
    [([], 3 / 5), (["small"], 4 / 5), (["red", "large"], 3 / 5), (["blue navy", "small"], 1.0)],
)
def test_options_count_one_each(chosen: list[str], reward: float) -> None:
    assert score(GOAL, LAMP, chosen).reward == pytest.approx(reward)


def test_the_price_counts_one() -> None:
    assert score(GOAL, other(price=30.0), ["navy blue", "small"]).reward == pytest.approx(1.0)
    assert score(GOAL, other(price=30.01), ["navy blue", "small"]).reward == pytest.approx(4 / 5)


def test_attributes_count_if_listed_or_told() -> None:
    plain = other(attributes=("assemble easy",), features=())
    assert score(GOAL, plain, ["navy blue", "small"]).attribute_score == 0.5
    told = other(attributes=(), features=(), description="With a spare bulb, easy assemble.")
    assert score(GOAL, told, ["navy blue", "small"]).attribute_score == 1.0
    assert score(GOAL, other(attributes=(), features=()), []).attribute_score == 0.0


@pytest.mark.parametrize(
    ("title", "query", "category", "expected"),
    [
        ("garden hose", "hose", "garden › water", 0.0),  # no word in common
        ("desk lamp", "other", "other", 1.0),  # two of five words
        ("plain lamp", "other", "other", 0.5),  # one of five words: 0.2, and nothing fits
        ("plain lamp", "desk lamp", "other", 1.0),  # the query fits
        ("plain lamp", "other", "lighting › home", 1.0),  # two parts of the path fit
        ("plain lamp", "other", "home › garden", 0.5),  # one part does not do
    ],
)
def test_the_type_scores_by_title_query_and_category(
    title: str, query: str, category: str, expected: float
) -> None:
    product = other(title=title, query=query, product_category=category)
    assert score_type(LAMP, product) == expected


def test_a_share_below_a_tenth_scores_a_tenth_whatever_else_fits() -> None:
    long = other(title="one two three four five six seven eight nine ten lamp")
    assert score_type(long, other(title="lamp")) == 0.1


def test_the_type_multiplies_the_rest() -> None:
    half = other(title="plain lamp", query="other", product_category="")
    assert score(GOAL, half, ["navy blue", "small"]).reward == pytest.approx(0.5)


def test_words_that_matter_leave_out_function_words_and_numbers() -> None:
    assert title_words("The 2 pack of Lamps, 10 inch, for the desk") == ("lamps", "desk")


def test_repeated_words_of_the_wanted_title_count_each() -> None:
    # One word in common of six, "lamp" and five times "desk": 1/6, at most 0.2.
    wanted = other(title="lamp desk desk desk desk desk")
    bought = other(title="lamp", query="other", product_category="")
    assert score_type(wanted, bought) == 0.5


def test_queries_that_are_missing_do_not_fit() -> None:
    wanted, bought = other(query=""), other(title="plain lamp", query="", product_category="x")
    assert score_type(wanted, bought) == 0.5


@pytest.mark.parametrize(
    ("wanted", "chosen", "is_met"),
    [
        ("navy blue", "light blue", True),  # both blue: "blue" is before "light" and "navy"
        ("navy blue", "royal", False),
        ("light purple", "light pink", True),  # both light: "light" is before "pink" and "purple"
        ("light green", "light pink", False),  # green, light
        ("dark purple", "deep purple", False),  # dark, purple
        ("Grey", "light grey", True),
        ("tapered", "red", True),  # a colour inside a word
        ("small", "large", False),
    ],
)
def test_option_values_count_as_the_first_colour_that_they_contain(
    wanted: str, chosen: str, is_met: bool
) -> None:
    goal = GOAL._replace(attributes=("energy saving",), options=(("color", wanted),))
    found = score(goal, LAMP, [chosen])
    assert found.option_score == float(is_met)
    assert found.reward == pytest.approx((1 + is_met + 1) / 3)


def test_attributes_do_not_count_as_colours() -> None:
    goal = GOAL._replace(attributes=("navy blue trim",), options=())
    bought = other(attributes=("light blue shade",), features=())
    assert score(goal, bought, []).attribute_score == 0.0


def test_colours_have_the_published_order_on_which_the_first_one_depends() -> None:
    assert len(COLOURS) == 102
    assert list(COLOURS) == sorted(COLOURS)
    assert [base_colour(value) for value in ("black forest", "violet lavender", "webshop", "")] == [
        "black",
        "lavender",
        "webshop",
        "",
    ]


@pytest.mark.parametrize(
    ("one", "other", "ratio", "is_met"),
    [
        # No word in common, so 100 * 2 * matching / (both lengths), by hand:
        ("abcdefghijk1", "abcdefghijk2", 200 * 11 / 24, True),  # 91.7
        ("abcdef1", "abcdef", 200 * 6 / 13, True),  # 92.3
        ("a" * 47 + "b" * 8, "a" * 47 + "c" * 8, 200 * 47 / 110, False),  # 85.45, rounded 85
        ("a" * 59 + "b" * 10, "a" * 59 + "c" * 10, 200 * 59 / 138, True),  # 85.507, rounded 86
    ],
)
def test_ratios_are_rounded_before_they_are_compared(
    one: str, other: str, ratio: float, is_met: bool
) -> None:
    assert fuzz.token_set_ratio(one, other) == pytest.approx(ratio)
    assert is_similar(one, other) is is_met


def test_letters_with_accents_are_left_out_of_a_comparison() -> None:
    assert is_similar("éclairé", "clair")  # 100, and 100 * 10 / 12 with the accents
    assert not is_similar("é", "è")


def test_texts_are_alike_whatever_the_order_of_words() -> None:
    assert is_similar("Machine-Washable", "machine washable")
    assert is_similar("washable, by machine", "machine washable by")
    assert not is_similar("red", "blue")
