"""What the reward service and its function processes say to each other.

A process first sends one `Loaded`; then it answers every `Call` with one `Returned`, in order.
"""

from __future__ import annotations

import msgspec

from tailrace_protos.reward import ScoreItem


class Call(msgspec.Struct, frozen=True):
    """Call `function` (`module:name`) for an item."""

    function: str
    item: ScoreItem


class Returned(msgspec.Struct, frozen=True):
    """A function's number, or why there is none."""

    value: float = 0.0
    error: str = ""


class Loaded(msgspec.Struct, frozen=True):
    """Which functions could not be imported, and why."""

    errors: dict[str, str] = {}
