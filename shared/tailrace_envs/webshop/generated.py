"""Small generated catalogues: products of a few kinds that differ in attributes and options.

A catalogue is a pure function of (number of products, seed). Every kind has several products, so that
the kind alone does not identify a product. Title, features and options state everything about a
product. Titles are distinct up to `NUM_TITLES` products. They combine few words, so that each word of a
held-out title occurs in titles of training too.
"""

from collections.abc import Sequence
from functools import lru_cache
from itertools import combinations
from typing import NamedTuple

import numpy as np

from tailrace_envs.webshop.catalogue import Product


class ProductKind(NamedTuple):
    """Kind of product in shoppers' words, with its place in the shop."""

    query: str
    category: str
    aisle: str
    attributes: tuple[str, ...]
    options: dict[str, tuple[str, ...]]


_COLORS = ("red", "blue", "green", "black", "white", "yellow")
_SIZES = ("small", "medium", "large")
_WEAR = ("cotton", "wool", "washable", "waterproof", "slim", "lightweight")
_HOME = ("wooden", "steel", "foldable", "handmade", "sturdy", "compact")
_FOOD = ("organic", "sugarfree", "vegan", "roasted", "salted", "crunchy")
_FLAVORS = ("lemon", "vanilla", "honey", "cocoa")
_PACKS = ("single", "double", "family")

KINDS = tuple(
    ProductKind(query, category, aisle, attributes, options)
    for category, attributes, options, kinds in (
        ("fashion", _WEAR, {"color": _COLORS, "size": _SIZES},
         (("shirt", "tops"), ("jacket", "tops"), ("trousers", "legwear"), ("socks", "legwear"))),
        ("garden", _HOME, {"color": _COLORS, "size": _SIZES},
         (("lamp", "lighting"), ("chair", "seating"), ("table", "tables"), ("shelf", "storage"))),
        ("grocery", _FOOD, {"flavor": _FLAVORS, "pack": _PACKS},
         (("nuts", "snacks"), ("biscuits", "snacks"), ("tea", "drinks"), ("porridge", "breakfast"))),
    )
    for query, aisle in kinds
)  # fmt: skip

NUM_ATTRIBUTES = 2
MAX_VALUES = 3
NUM_TITLES = sum(len(list(combinations(kind.attributes, NUM_ATTRIBUTES))) for kind in KINDS)
PRICES = range(5, 60)


@lru_cache(maxsize=8)
def generate_products(num_products: int, seed: int) -> tuple[Product, ...]:
    """Generates products `b000`, `b001`, ...; the kinds take turns."""
    random = np.random.RandomState([0x5709, seed & 0xFFFFFFFF])
    pairs = [_shuffled(tuple(combinations(kind.attributes, NUM_ATTRIBUTES)), random) for kind in KINDS]
    return tuple(_product(number, pairs[number % len(KINDS)], random) for number in range(num_products))


def _product(number: int, pairs: Sequence[tuple[str, ...]], random: np.random.RandomState) -> Product:
    kind = KINDS[number % len(KINDS)]
    attributes = pairs[number // len(KINDS) % len(pairs)]
    options = {
        name: _some(values, random.randint(2, MAX_VALUES + 1), random)
        for name, values in kind.options.items()
    }
    return Product(
        asin=f"b{number:03d}",
        title=f"{' '.join(attributes)} {kind.query}",
        price=float(PRICES[random.randint(len(PRICES))]),
        category=kind.category,
        query=kind.query,
        product_category=f"{kind.category} › {kind.aisle} › {kind.query}",
        options=options,
        attributes=attributes,
        description=f"a {kind.query} that is {' and '.join(attributes)}",
        features=attributes,
        reviews=(f"a good {kind.query}",),
        rating=float(random.randint(3, 6)),
    )


def _some(values: tuple[str, ...], number: int, random: np.random.RandomState) -> tuple[str, ...]:
    chosen = sorted(random.permutation(len(values))[:number])
    return tuple(values[index] for index in chosen)


def _shuffled(
    pairs: tuple[tuple[str, ...], ...], random: np.random.RandomState
) -> tuple[tuple[str, ...], ...]:
    return tuple(pairs[index] for index in random.permutation(len(pairs)))
