"""What an episode asks for: goals made of the catalogue, their wording, and their splits.

A product's instruction becomes a goal, or, where it leaves options open, a goal for every combination
of option values (as published; of more than `MAX_COMBINATIONS` so many, drawn evenly by the seed). The
price limit is drawn as published: of the first four of 10, 20, ..., 990 dollars that are above the
price the upper one of two; no limit where fewer than two are above it. A goal belongs to one split, for
ever, by a hash of product, attributes and options.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from itertools import combinations, product
from math import inf, prod
from typing import NamedTuple

import numpy as np

from tailrace_envs.webshop.catalogue import Instruction, Product

MAX_COMBINATIONS = 24
PRICE_LIMITS = tuple(10.0 * step for step in range(1, 100))  # dollars

Options = tuple[tuple[str, str], ...]  # (option, value)


class Goal(NamedTuple):
    """A wish, and the product that fulfils it."""

    product: Product
    instruction: str
    attributes: tuple[str, ...]
    options: Options
    max_price: float  # dollars, infinite without a limit

    @property
    def values(self) -> tuple[str, ...]:
        """Option values to choose."""
        return tuple(value for _, value in self.options)

    @property
    def digest(self) -> bytes:
        """A fingerprint, the same everywhere."""
        parts = [self.product.asin, *self.attributes, *map(str, self.options)]
        return _draw("\n".join(parts))

    @property
    def is_held_out(self) -> bool:
        """The split: a quarter of all goals are held out."""
        return self.digest[0] < 64


def make_goals(products: Sequence[Product], seed: int, *, only_given: bool) -> tuple[Goal, ...]:
    """All goals, in an order that mixes the products. `only_given`: none for products without any
    instruction."""
    goals = [
        goal
        for one in products
        for instruction in one.instructions or _own_instruction(one, only_given)
        for goal in _goals(one, instruction, seed)
    ]
    return tuple(sorted(goals, key=lambda goal: goal.digest))


def _own_instruction(product: Product, only_given: bool) -> tuple[Instruction, ...]:
    """A wish for a product that comes without one."""
    if only_given or not product.attributes or not product.query:
        return ()
    words = " ".join((*product.attributes, product.query))
    return (Instruction(f"i am looking for {words}", product.attributes),)


def _goals(product: Product, instruction: Instruction, seed: int) -> Iterator[Goal]:
    is_open = instruction.options is None
    for options in _combinations(product, seed) if is_open else [_wanted(instruction)]:
        limit = _max_price(product.price, f"{seed}:{product.asin}:{instruction.text}:{options}")
        wanted = " and ".join(f"{name}: {value}" for name, value in options)
        text = instruction.text + (f" with {wanted}" if wanted and is_open else "")
        text += f", and price lower than {limit:.2f} dollars" if limit < inf else ""
        yield Goal(product, text, instruction.attributes, options, limit)


def _wanted(instruction: Instruction) -> Options:
    return tuple((instruction.options or {}).items())


def _combinations(one: Product, seed: int) -> Iterable[Options]:
    """A value for every option, in all ways or `MAX_COMBINATIONS` of them."""
    pairs = [
        [(name, value) for value in dict.fromkeys(values)]
        for name, values in one.options.items()
        if values
    ]
    if prod(map(len, pairs)) <= MAX_COMBINATIONS:
        return product(*pairs)
    random = np.random.RandomState(list(_draw(f"{seed}:{one.asin}")))
    chosen: dict[Options, None] = {}
    while len(chosen) < MAX_COMBINATIONS:
        chosen[tuple(values[random.randint(len(values))] for values in pairs)] = None
    return chosen


def _max_price(price: float, goal: str) -> float:
    pairs = list(combinations([limit for limit in PRICE_LIMITS if limit > price][:4], 2))
    return pairs[int.from_bytes(_draw(goal), "big") % len(pairs)][1] if pairs else inf


def _draw(text: str) -> bytes:
    """Eight bytes that the text fixes."""
    return hashlib.blake2b(text.encode(), digest_size=8).digest()
