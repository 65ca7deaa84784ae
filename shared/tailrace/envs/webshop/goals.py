"""What an episode asks for: goals made of the catalogue, their wording, and their splits.

A product's instruction becomes a goal, or, where it leaves options open, a goal for every
combination of option values (as published). The price limit is one of the next four multiples of ten
dollars above the price. A goal belongs to one split, for ever, by a hash of product, attributes and
options.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from itertools import islice, product
from typing import NamedTuple

from tailrace.envs.webshop.catalogue import Instruction, Product

MAX_COMBINATIONS = 24
_PRICE_STEP = 10.0


class Goal(NamedTuple):
    """A wish, and the product that fulfils it."""

    product: Product
    instruction: str
    attributes: tuple[str, ...]
    options: tuple[tuple[str, str], ...]  # (option, value)
    max_price: float

    @property
    def values(self) -> tuple[str, ...]:
        """Option values to choose."""
        return tuple(value for _, value in self.options)

    @property
    def digest(self) -> bytes:
        """A fingerprint, the same everywhere."""
        parts = [self.product.asin, *self.attributes, *map(str, self.options)]
        return hashlib.blake2b("\n".join(parts).encode(), digest_size=8).digest()

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
    for options in _combinations(product, instruction):
        limit = _max_price(product, options, seed)
        wanted = " and ".join(f"{name}: {value}" for name, value in options)
        text = instruction.text + (f" with {wanted}" if wanted and not instruction.options else "")
        text += f", and price lower than {limit:.2f} dollars"
        yield Goal(product, text, instruction.attributes, options, limit)


def _combinations(one: Product, instruction: Instruction) -> Iterator[tuple[tuple[str, str], ...]]:
    if instruction.options or not one.options:
        yield tuple(instruction.options.items())
        return
    pairs = [[(name, value) for value in values] for name, values in one.options.items()]
    yield from islice(product(*pairs), MAX_COMBINATIONS)


def _max_price(product: Product, options: tuple[tuple[str, str], ...], seed: int) -> float:
    text = f"{seed}:{product.asin}:{options}"
    draws = hashlib.blake2b(text.encode(), digest_size=2).digest()
    steps = 1 + max(draw % 4 for draw in draws)
    return (product.price // _PRICE_STEP + steps) * _PRICE_STEP
