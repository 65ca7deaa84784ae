"""Interface of environments: gymnasium's API with text in and text out.

Subclass `gymnasium.Env[str, str]`, or write any class with these four methods; nothing here needs
gymnasium itself. If a text does not parse, the environment must answer with an observation (and a
penalty), never with an exception. An environment whose `reset(seed=...)` and
replies fix all that happens can be resumed after a crash without sampling a token again.
"""

from typing import Any, Protocol, SupportsFloat


class Env(Protocol):
    """One episode at a time: `reset` begins it, `step` until `terminated` or `truncated`.

    `info` of the last step may hold numbers, which become the episode's metrics; `success` (0 to 1)
    is the one that success rates are made of.
    """

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[str, dict[str, Any]]:
        """Begin the episode that `seed` fixes: (first observation, info).

        `info["instructions"]`, a text: what of the observation the model must go on seeing where its
        `history_turns` end before it; empty: nothing. Without it: all of the observation.
        """

    def step(self, action: str, /) -> tuple[str, SupportsFloat, bool, bool, dict[str, Any]]:
        """Take the model's reply: (observation, reward, terminated, truncated, info)."""

    def render(self) -> Any:
        """The current frame as RGB array [height, width, 3] of uint8 or as text, or None."""

    def close(self) -> None:
        """Free what the environment holds."""
