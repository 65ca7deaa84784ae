"""The published reward of a purchase (Yao et al. 2022, arXiv:2207.01206, section 3 and appendix):

    r = r_type * (|attributes met| + |options met| + [price <= limit])
               / (|attributes| + |options| + 1)

    r_type = 0     if the titles share no word that matters
             0.1   if they share less than 0.1 of the wanted title's
             0.5   if they share at most 0.2, and neither query nor category fits
             1     otherwise

An attribute is met if the product has one alike (token set ratio above 85) or its title, features or
description contain it; an option if a chosen value is alike. A category fits if two parts of the paths
are the same. The published code takes nouns as found by a tagger for the words that matter in a
title; here they are all words but a few function words, units and numbers, since a tagger is a model of
its own.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import lru_cache
from typing import NamedTuple

from rapidfuzz import fuzz, utils

from tailrace.envs.webshop.catalogue import Product
from tailrace.envs.webshop.goals import Goal

ALIKE = 85.0
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
    chosen = tuple(chosen)
    num_attributes = sum(_has_attribute(bought, attribute) for attribute in goal.attributes)
    num_options = sum(any(is_alike(value, one) for one in chosen) for value in goal.values)
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
    share = len(words & title_words(bought.title)) / len(words) if words else 0.2
    if share == 0.0:
        return 0.0
    if share < 0.1:
        return 0.1
    fits = wanted.query == bought.query or _same_category(wanted, bought)
    return 1.0 if fits or share > 0.2 else 0.5


@lru_cache(maxsize=65_536)
def title_words(title: str) -> frozenset[str]:
    """The words of a title that say what it is."""
    return frozenset(_WORD.findall(title.lower())) - _FUNCTION_WORDS


def is_alike(one: str, other: str) -> bool:
    """Whether two texts mean the same, whatever their words' order and what one says besides."""
    return fuzz.token_set_ratio(one, other, processor=utils.default_process) > ALIKE


def _same_category(one: Product, other: Product) -> bool:
    paths = ({part.strip() for part in product.product_category.split("›")} for product in (one, other))
    return len(set.intersection(*paths) - {""}) >= 2


def _has_attribute(product: Product, attribute: str) -> bool:
    if any(is_alike(one, attribute) for one in product.attributes):
        return True
    texts = (product.title, " ".join(product.features), product.description)
    return any(attribute in text.lower() for text in texts)
