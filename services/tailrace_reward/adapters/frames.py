"""Messages between the reward service and its function processes.

A process first sends one `FunctionsLoaded`. Then it answers every `ScoringCall` with one `Returned`, in
order.
"""

from typing import Any

import msgspec

from tailrace_protos.reward import ScoreItem


class ScoringCall(msgspec.Struct, frozen=True):
    """Call of `function` (`module:name`) for an item, with keyword arguments.

    With `cpu_s` the kernel kills the process after so much processor time.
    """

    function: str
    item: ScoreItem
    args: dict[str, Any] = {}
    cpu_s: float = 0.0


class Returned(msgspec.Struct, frozen=True):
    """Number of a function, or the reason why there is none."""

    value: float = 0.0
    error: str = ""


class FunctionsLoaded(msgspec.Struct, frozen=True):
    """Functions that could not be imported, with reasons."""

    errors: dict[str, str] = {}
