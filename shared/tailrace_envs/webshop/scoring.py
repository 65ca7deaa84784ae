"""The published reward of a purchase (Yao et al. 2022, arXiv:2207.01206, section 3 and appendix):

    r = r_type * (|attributes met| + |options met| + [price <= limit])
               / (|attributes| + |options| + 1)

    r_type = 0     if the titles share no word that matters
             0.1   if they share less than 0.1 of the wanted title's
             0.5   if they share at most 0.2, and neither query nor category fits
             1     otherwise

An attribute is met if the product has one alike or its title, features or description contain it; an
option if a chosen value is alike. Alike are texts whose token set ratio, rounded, is above 85; option
values that contain a colour of `colours` count as that colour. Shares are of all words of the wanted
title that matter, repeated ones counted. Queries fit if they are the same and not empty, categories if
two parts of the paths are the same.

Where `tailrace_envs.webshop` differs from the published code (github.com/princeton-nlp/WebShop):

- Words that matter in a title: there nouns, as spaCy's tagger finds them, a model of its own; here all
  words but a few function words, units and numbers.
- Price of a range: there drawn between its ends at every start, here the lower end.
- Price limits have the published distribution, but are fixed by `catalogue.seed` and the goal.
- Goals: there shuffled, 500 for tests, 1,000 for development; here a quarter, by a hash, is held out.
  Of a product's combinations there all are goals, drawn by how rare their attributes are; here at most
  24, all alike.
- Options: versions of that code differ (one wants sizes exactly); here every wanted value may be alike
  to any chosen one, without the options' names.
- Ratios: there of difflib unless python-Levenshtein is installed, here always as with it.
- Case matters nowhere here; there a few comparisons mind it.
- A value that two options have: there it sets the last of them, here the first not yet chosen.
- Search: there Lucene's BM25 with stemming, here plain words, and no keywords such as `<r>`.
- Wording of pages and of instructions with options; no reviews and ratings of published products.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import lru_cache
from typing import NamedTuple

from rapidfuzz import fuzz, utils

from tailrace_envs.webshop.catalogue import Product
from tailrace_envs.webshop.colours import base_colour
from tailrace_envs.webshop.goals import Goal

ALIKE = 85
_LATIN_1 = dict.fromkeys(range(128, 256))  # thefuzz leaves these letters out
_WORD = re.compile(r"[^\W\d_][\w'-]+")
_FUNCTION_WORDS = frozenset(
    _WORD.findall(
        "a an and are as at be by for from in is it of on or our that the this to up with your "
        "inch inches oz ounce lb count pack"
    )
)


class Score(NamedTuple):
    """A purchase's reward with its parts, each 0 to 1."""

    reward: float
    type_score: float
    attribute_score: float
    option_score: float
    price_score: float


def score(goal: Goal, bought: Product, chosen: Iterable[str]) -> Score:
    """How well `bought` with the option values `chosen` fulfils a goal."""
    colours = [base_colour(value) for value in chosen]
    num_attributes = sum(_has_attribute(bought, attribute) for attribute in goal.attributes)
    num_options = sum(
        any(is_alike(base_colour(value), one) for one in colours) for value in goal.values
    )
    is_cheap = bought.price <= goal.max_price
    wanted = len(goal.attributes) + len(goal.values) + 1
    type_score = score_type(goal.product, bought)
    return Score(
        type_score * (num_attributes + num_options + is_cheap) / wanted,
        type_score,
        num_attributes / max(len(goal.attributes), 1),
        num_options / max(len(goal.values), 1),
        float(is_cheap),
    )


def score_type(wanted: Product, bought: Product) -> float:
    """`r_type`."""
    words = title_words(wanted.title)
    share = len({*words} & {*title_words(bought.title)}) / len(words) if words else 0.2
    if share == 0.0:
        return 0.0
    if share < 0.1:
        return 0.1
    same_query = wanted.query != "" and wanted.query == bought.query
    return 1.0 if same_query or _same_category(wanted, bought) or share > 0.2 else 0.5


@lru_cache(maxsize=65_536)
def title_words(title: str) -> tuple[str, ...]:
    """The words of a title that say what it is, in its order."""
    return tuple(word for word in _WORD.findall(title.lower()) if word not in _FUNCTION_WORDS)


def is_alike(one: str, other: str) -> bool:
    """Whether two texts mean the same, whatever their words' order and what one says besides."""
    ratio = fuzz.token_set_ratio(
        one.translate(_LATIN_1), other.translate(_LATIN_1), processor=utils.default_process
    )
    return round(ratio) > ALIKE


def _same_category(one: Product, other: Product) -> bool:
    paths = ({part.strip() for part in product.product_category.split("›")} for product in (one, other))
    return len(set.intersection(*paths)) >= 2


def _has_attribute(product: Product, attribute: str) -> bool:
    if any(is_alike(one, attribute) for one in product.attributes):
        return True
    texts = (product.title, " ".join(product.features), product.description)
    return any(attribute.lower() in text.lower() for text in texts)
