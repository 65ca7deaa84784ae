"""Interface of environments: gymnasium's API with text in and text out.

Subclass `gymnasium.Env[str, str]`, or write any class with these four methods; nothing here needs
gymnasium itself. If a text does not parse, the environment must answer with an observation (and a
penalty), never with an exception. A deterministic environment (same `reset(seed=...)` and replies, same
answers) can be resumed after a crash without sampling a token again.
"""

from collections.abc import Mapping
from typing import Any, Protocol, SupportsFloat

import numpy as np

NUMBER = (int, float, np.integer, np.floating, np.bool_)
"""Types of `info` that count as numbers; `bool` is an `int`."""


class Env(Protocol):
    """One episode at a time: `reset` begins it, `step` until `terminated` or `truncated`.

    Numbers in `info` of the last step become the episode's metrics; success rates are means of
    `success` (0 to 1).
    """

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[str, dict[str, Any]]:
        """Begins the episode that `seed` fixes: (first observation, info).

        `info["instructions"]`, a text: the part of the observation that the model still sees when
        `history_turns` cuts the observation off; empty: nothing. Without it: all of the observation.
        """

    def step(self, action: str, /) -> tuple[str, SupportsFloat, bool, bool, dict[str, Any]]:
        """Takes the model's reply: (observation, reward, terminated, truncated, info)."""

    def render(self) -> Any:
        """Returns the current frame as RGB array [height, width, 3] of uint8 or as text, or None."""

    def close(self) -> None:
        """Frees the resources of the environment."""


def opening_text(observation: str, info: object) -> str:
    """Returns the text that a policy still sees when the first observation is cut off: `instructions`,
    else all of it. It ends with its own end of line; it may be empty.
    """
    said = info.get("instructions") if isinstance(info, Mapping) else None
    opening = said if isinstance(said, str) else observation
    return opening if not opening or opening.endswith("\n") else f"{opening}\n"
