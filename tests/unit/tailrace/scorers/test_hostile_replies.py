"""Replies that are made to take long: scorers and environments read them in linear time."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from gymnasium import spaces

from tailrace.cpu_limit import cpu_limit
from tailrace.scorers import maths, texts
from tailrace.scorers.code import program_of
from tailrace_envs.published.spaces_text import action_reader
from tailrace_envs.webshop.environment import read_action

NUM_CHARS = 50_000
HANG_S = 20.0
PIECES = (
    *("<answer>", "</answer>", "```", "```json\n", "```a", "\\boxed{", "answer is ", "####", "$", "1"),
    *("1,", "1.", "-1e", "search[", "click [", "[", "]", "a", " ", "\n", "A)", "option ", "or B"),
    *("\\frac{", "**", "/"),
)
BEGINS = ("", "<answer>", "\\boxed{", "```", "answer is ", "search[")
SCHEMA = {"type": "object"}
READERS: dict[str, Callable[[str], object]] = {
    "gsm8k": lambda reply: maths.gsm8k(reply, "1"),
    "aime": lambda reply: maths.aime(reply, "1"),
    "math": lambda reply: maths.math(reply, "1"),
    "mcq": lambda reply: texts.mcq(reply, "A"),
    "em": lambda reply: texts.em(reply, "a"),
    "f1": lambda reply: texts.f1(reply, "a b"),
    "code": program_of,
    "webshop": lambda reply: read_action(reply, ["Buy Now", "< Prev"]),
    "gymnasium": action_reader(spaces.Box(-1.0, 1.0, (2,)), ()),
    "json_schema": lambda reply: texts.json_schema(reply, SCHEMA),
}


@pytest.mark.parametrize("name", sorted(READERS))
def test_hostile_replies_are_read_in_time_and_scored_from_0_to_1(name: str) -> None:
    """Repeated pieces, alone and behind a beginning."""
    for piece in PIECES:
        for begin in BEGINS:
            with cpu_limit(HANG_S):
                found = READERS[name](begin + piece * (NUM_CHARS // len(piece)))
            assert not isinstance(found, float) or 0.0 <= found <= 1.0, f"{begin!r} {piece!r}"
