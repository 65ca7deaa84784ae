"""What the agents service and its workflow processes say to each other.

A process first gets one `Load` and answers with `Loaded`; then it answers every `Run` with a
`WorkflowEnd`.
"""

from __future__ import annotations

from typing import Any

import msgspec


class Load(msgspec.Struct, frozen=True):
    """Make the workflow."""

    agent: str
    kwargs: dict[str, Any]
    http_library: str


class Loaded(msgspec.Struct, frozen=True):
    """Whether it could be made; `error` is what the user reads if not."""

    error: str = ""


class Run(msgspec.Struct, frozen=True):
    """Play an episode."""

    data: dict[str, Any]
    base_url: str
    api_key: str
