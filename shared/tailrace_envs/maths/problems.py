"""Generated word problems: a person has things, and each sentence changes their number.

A problem is a pure function of (settings, split, seed). A hash of its question decides its split. All
intermediate numbers are whole and positive.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from tailrace_envs.splits import Split, is_held_out

MAX_ATTEMPTS = 1000
NAMES = ("Ada", "Ben", "Cleo", "Dan", "Eva", "Finn", "Gita", "Hugo")
THINGS = ("apples", "books", "coins", "stamps", "marbles", "shells", "cards", "pencils")

Draw = Callable[[int, int], int]  # draws a number from low to high, both included


class WordProblem(NamedTuple):
    """Question with its answer as text."""

    question: str
    answer: str


class Operation(NamedTuple):
    """Sentence with the number of things after it."""

    sentence: str
    number: int


def problem_for_seed(num_operations: int, max_number: int, split: Split, seed: int) -> WordProblem:
    """Problem of a split that a seed selects."""
    words = [seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF]
    for attempt in range(MAX_ATTEMPTS):
        random = np.random.RandomState([*words, attempt])
        problem = _problem(num_operations, max_number, random)
        if split == "all" or is_held_out(problem.question) == (split == "held_out"):
            return problem
    raise AssertionError("half of all problems are in either split")


def _problem(num_operations: int, max_number: int, random: np.random.RandomState) -> WordProblem:
    def draw(low: int, high: int) -> int:
        return int(random.randint(low, high + 1))

    name = NAMES[draw(0, len(NAMES) - 1)]
    thing = THINGS[draw(0, len(THINGS) - 1)]
    number = draw(2, max_number)
    sentences = [f"{name} has {number} {thing}."]
    for _ in range(num_operations):
        operation = _OPERATIONS[draw(0, len(_OPERATIONS) - 1)](name, thing, number, max_number, draw)
        number = operation.number
        sentences.append(operation.sentence)
    sentences.append(f"How many {thing} does {name} have now?")
    return WordProblem(" ".join(sentences), str(number))


def _gain(name: str, thing: str, number: int, max_number: int, draw: Draw) -> Operation:
    more = draw(2, max_number)
    return Operation(f"{name} gets {more} more {thing}.", number + more)


def _loss(name: str, thing: str, number: int, max_number: int, draw: Draw) -> Operation:
    if number < 3:
        return _gain(name, thing, number, max_number, draw)
    fewer = draw(1, min(number - 1, max_number))
    return Operation(f"{name} gives {fewer} {thing} away.", number - fewer)


def _multiplication(name: str, thing: str, number: int, max_number: int, draw: Draw) -> Operation:
    times = draw(2, 4)
    return Operation(f"Then {name} has {times} times as many {thing}.", number * times)


def _division(name: str, thing: str, number: int, max_number: int, draw: Draw) -> Operation:
    shares = [share for share in (2, 3, 4, 5) if number % share == 0]
    if not shares:
        return _loss(name, thing, number, max_number, draw)
    share = shares[draw(0, len(shares) - 1)]
    sentence = f"{name} parts the {thing} into {share} equal heaps and keeps one of them."
    return Operation(sentence, number // share)


_OPERATIONS = (_gain, _loss, _multiplication, _division)
