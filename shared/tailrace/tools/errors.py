"""What can go wrong before a tool is called."""

from __future__ import annotations

from collections.abc import Sequence


class ToolsMissingError(LookupError):
    """Nobody serves some of the tools asked for. Attributes: `names`, `found` (what is served)."""

    def __init__(self, names: Sequence[str], found: Sequence[str], waited_s: float) -> None:
        known = ", ".join(sorted(found)) or "no tool at all"
        super().__init__(
            f"no worker serves {', '.join(names)} (waited {waited_s:g} s; {known} is served): start "
            "one with `tailrace tools serve module:tool`, or correct the name"
        )
        self.names = tuple(names)
        self.found = tuple(found)
