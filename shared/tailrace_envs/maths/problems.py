"""Generated word problems: somebody has things, then one thing after another happens.

A problem is a pure function of (settings, split, seed). It belongs to one split, for ever and
everywhere, by a hash of its words. Numbers on the way stay whole and positive.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from tailrace_envs.maths.config import Split

MAX_ATTEMPTS = 1000
NAMES = ("Ada", "Ben", "Cleo", "Dan", "Eva", "Finn", "Gita", "Hugo")
THINGS = ("apples", "books", "coins", "stamps", "marbles", "shells", "cards", "pencils")

Draw = Callable[[int, int], int]  # a number from low to high, both included


class Problem(NamedTuple):
    """A question, and its answer as text."""

    question: str
    answer: str


class Happening(NamedTuple):
    """A sentence, and what there is after it."""

    sentence: str
    number: int


def problem_for_seed(num_operations: int, max_number: int, split: Split, seed: int) -> Problem:
    """The problem that a seed chooses from the split."""
    words = [seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF]
    for attempt in range(MAX_ATTEMPTS):
        random = np.random.RandomState([*words, attempt])
        problem = _problem(num_operations, max_number, random)
        if split == "all" or is_held_out(problem) == (split == "held_out"):
            return problem
    raise AssertionError("half of all problems are in either split")


def is_held_out(problem: Problem) -> bool:
    """The split of a problem: half of all problems are held out."""
    return hashlib.blake2b(problem.question.encode(), digest_size=1).digest()[0] < 128


def _problem(num_operations: int, max_number: int, random: np.random.RandomState) -> Problem:
    def draw(low: int, high: int) -> int:
        return int(random.randint(low, high + 1))

    name = NAMES[draw(0, len(NAMES) - 1)]
    thing = THINGS[draw(0, len(THINGS) - 1)]
    number = draw(2, max_number)
    sentences = [f"{name} has {number} {thing}."]
    for _ in range(num_operations):
        happening = _HAPPENINGS[draw(0, len(_HAPPENINGS) - 1)](name, thing, number, max_number, draw)
        number = happening.number
        sentences.append(happening.sentence)
    sentences.append(f"How many {thing} does {name} have now?")
    return Problem(" ".join(sentences), str(number))


def _gain(name: str, thing: str, number: int, max_number: int, draw: Draw) -> Happening:
    more = draw(2, max_number)
    return Happening(f"{name} gets {more} more {thing}.", number + more)


def _loss(name: str, thing: str, number: int, max_number: int, draw: Draw) -> Happening:
    if number < 3:
        return _gain(name, thing, number, max_number, draw)
    fewer = draw(1, min(number - 1, max_number))
    return Happening(f"{name} gives {fewer} {thing} away.", number - fewer)


def _multiplication(name: str, thing: str, number: int, max_number: int, draw: Draw) -> Happening:
    times = draw(2, 4)
    return Happening(f"Then {name} has {times} times as many {thing}.", number * times)


def _division(name: str, thing: str, number: int, max_number: int, draw: Draw) -> Happening:
    shares = [share for share in (2, 3, 4, 5) if number % share == 0]
    if not shares:
        return _loss(name, thing, number, max_number, draw)
    share = shares[draw(0, len(shares) - 1)]
    sentence = f"{name} parts the {thing} into {share} equal heaps and keeps one of them."
    return Happening(sentence, number // share)


_HAPPENINGS = (_gain, _loss, _multiplication, _division)
