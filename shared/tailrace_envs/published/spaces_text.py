"""Conversion between gymnasium's spaces and texts: observations to text, replies to actions."""

import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from gymnasium import spaces

_DECIMALS = 3
_NUMBER = re.compile(r"(?<![\w.])[-+]?(?:\d++(?:\.\d++|\.(?!\w))?|\.\d++)(?:[eE][-+]?\d++)?(?!\w|\.\d)")
_MINUS = str.maketrans("\N{MINUS SIGN}", "-")

ReadAction = Callable[[str], Any]  # None for a reply without an action


def observation_text(space: spaces.Space[Any], observation: Any) -> str:
    """Converts an observation: texts unchanged, numbers rounded, parts with their names."""
    if isinstance(space, spaces.Dict):
        parts = (f"{key}: {observation_text(space[key], observation[key])}" for key in space)
        return "\n".join(parts)
    if isinstance(space, spaces.Tuple):
        pairs = zip(space.spaces, observation, strict=True)
        return "\n".join(observation_text(part, value) for part, value in pairs)
    if isinstance(space, spaces.Text) or isinstance(observation, str):
        return str(observation)
    values = np.asarray(observation)
    if np.issubdtype(values.dtype, np.floating):
        values = np.round(values.astype(np.float64), _DECIMALS)
    return np.array2string(values, separator=", ", floatmode="maxprec", threshold=10_000)


def action_reader(space: spaces.Space[Any], names: Sequence[str]) -> ReadAction:
    """Returns the reader of replies for a space. `names`: actions of a discrete space, in its order.

    Raises `ValueError` for an unsupported space and for names that do not fit it.
    """
    if names and not isinstance(space, spaces.Discrete):
        raise ValueError(f"actions: names are for discrete action spaces, found {space}: leave it out")
    if isinstance(space, spaces.Discrete):
        return _discrete_reader(space, names)
    if isinstance(space, spaces.Text):
        return lambda reply: reply if space.contains(reply) else None
    if isinstance(space, spaces.Box | spaces.MultiDiscrete | spaces.MultiBinary):
        return _array_reader(space)
    raise ValueError(f"action space {space} cannot be read from text: name a function as to_action")


def _discrete_reader(space: spaces.Discrete[Any], names: Sequence[str]) -> ReadAction:
    words = [str(name).lower() for name in names] or [
        str(number) for number in range(int(space.start), int(space.start) + int(space.n))
    ]
    if len(words) != space.n or len(set(words)) != len(words):
        raise ValueError(
            f"actions must name all {space.n} actions, each by a distinct word: found {names}"
        )
    longest_first = sorted(words, key=len, reverse=True)
    pattern = re.compile(f"({'|'.join(map(_standing_alone, longest_first))})")

    def read(reply: str) -> Any:
        found = pattern.search(reply.lower().translate(_MINUS))
        return space.start + words.index(found.group(1)) if found else None

    return read


def _standing_alone(word: str) -> str:
    """Pattern of a word that is not part of another word; of a number, not part of `-1` or `1.5`."""
    if word.lstrip("-").isdecimal():
        return rf"(?<![\w.+-]){re.escape(word)}(?!\w|\.\d)"
    return rf"(?<!\w){re.escape(word)}(?!\w)"


def _array_reader(space: spaces.Box | spaces.MultiDiscrete | spaces.MultiBinary) -> ReadAction:
    """Returns a reader of the first numbers in a reply (`2`, `-.5`, `1e-3`; `5m` is not a number).

    It clips the numbers of a `Box` to its bounds. A reply with too few or too large numbers, or with
    fractions for a space of integers, has no action.
    """
    num_numbers = int(np.prod(space.shape))
    dtype: np.dtype[Any] = np.dtype(space.dtype)
    has_integers = np.issubdtype(dtype, np.integer)
    largest = float(np.iinfo(dtype).max if has_integers else np.finfo(dtype).max)

    def read(reply: str) -> Any:
        numbers = _NUMBER.findall(reply.translate(_MINUS))[:num_numbers]
        if len(numbers) < num_numbers:
            return None
        values = np.array([float(number) for number in numbers]).reshape(space.shape)
        if isinstance(space, spaces.Box):
            values = np.clip(values, space.low, space.high)
        if (np.abs(values) > largest).any() or (has_integers and (values % 1 != 0).any()):
            return None
        action = values.astype(dtype)
        return action if space.contains(action) else None

    return read
