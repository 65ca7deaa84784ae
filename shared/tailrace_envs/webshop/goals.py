"""Goals of episodes, made of the catalogue: their texts and their splits.

An instruction of a product becomes one goal. If it leaves options open, each combination of option
values becomes a goal, as published; at most `MAX_COMBINATIONS`, drawn uniformly by the seed. The price
limit is drawn as published: the larger of two drawn from the first four of 10, 20, ..., 990 dollars
above the price; no limit if fewer than two are above it. The split of a goal is that of its product.
"""

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from itertools import combinations, product
from math import inf, prod
from typing import NamedTuple

import numpy as np

from tailrace_envs.splits import is_held_out
from tailrace_envs.webshop.catalogue import Instruction, Product

MAX_COMBINATIONS = 24
HELD_OUT_SHARE = 0.25
PRICE_LIMITS = tuple(10.0 * step for step in range(1, 100))  # dollars

Options = tuple[tuple[str, str], ...]  # (option, value)


class Goal(NamedTuple):
    """Task of an episode, with the product that fulfils it."""

    product: Product
    instruction: str
    attributes: tuple[str, ...]
    options: Options
    max_price: float  # dollars; infinite: no limit

    @property
    def values(self) -> tuple[str, ...]:
        """Required option values."""
        return tuple(value for _, value in self.options)

    @property
    def digest(self) -> bytes:
        """Hash of the goal, the same in every process."""
        parts = [self.product.asin, *self.attributes, *map(str, self.options)]
        return _hash("\n".join(parts))

    @property
    def is_held_out(self) -> bool:
        """True if the product is held out."""
        return is_held_out_product(self.product)


def is_held_out_product(product: Product) -> bool:
    """True for a quarter of all products; products of one title are in one split."""
    return is_held_out(f"product {' '.join(product.title.lower().split())}", HELD_OUT_SHARE)


def make_goals(products: Sequence[Product], seed: int, *, only_given: bool) -> tuple[Goal, ...]:
    """Makes all goals, in the order of their hashes, which mixes the products.

    `only_given`: products without an instruction get no goal.
    """
    goals = [
        goal
        for one in products
        for instruction in one.instructions or _own_instruction(one, only_given)
        for goal in _goals(one, instruction, seed)
    ]
    return tuple(sorted(goals, key=lambda goal: goal.digest))


def _own_instruction(product: Product, only_given: bool) -> tuple[Instruction, ...]:
    """Makes an instruction for a product that has none."""
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
    """All combinations of one value per option, or `MAX_COMBINATIONS` drawn ones."""
    pairs = [
        [(name, value) for value in dict.fromkeys(values)]
        for name, values in one.options.items()
        if values
    ]
    if prod(map(len, pairs)) <= MAX_COMBINATIONS:
        return product(*pairs)
    random = np.random.RandomState(list(_hash(f"{seed}:{one.asin}")))
    chosen: dict[Options, None] = {}
    while len(chosen) < MAX_COMBINATIONS:
        chosen[tuple(values[random.randint(len(values))] for values in pairs)] = None
    return chosen


def _max_price(price: float, goal: str) -> float:
    pairs = list(combinations([limit for limit in PRICE_LIMITS if limit > price][:4], 2))
    return pairs[int.from_bytes(_hash(goal), "big") % len(pairs)][1] if pairs else inf


def _hash(text: str) -> bytes:
    """Hashes a text to eight bytes."""
    return hashlib.blake2b(text.encode(), digest_size=8).digest()
