"""The data set of the CAMEL agent; the agents service, which has no CAMEL, reads it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any


def rows(split: str) -> Iterator[dict[str, Any]]:
    """The data set: eight prompts."""
    for number in range(8):
        yield {"prompt": f"Twice {number}?"}
