"""Messages between the reward service and its function processes.

A process first sends one `FunctionsLoaded`. Then it answers every `ScoringCall` with one `Returned`, in
order.
"""

from __future__ import annotations

import msgspec

from tailrace_protos.reward import ScoreItem


class ScoringCall(msgspec.Struct, frozen=True):
    """Call of `function` (`module:name`) for an item."""

    function: str
    item: ScoreItem


class Returned(msgspec.Struct, frozen=True):
    """A function's number, or why there is none."""

    value: float = 0.0
    error: str = ""


class FunctionsLoaded(msgspec.Struct, frozen=True):
    """Which functions could not be imported, and why."""

    errors: dict[str, str] = {}
