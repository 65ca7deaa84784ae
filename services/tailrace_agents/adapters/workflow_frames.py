"""Messages between the agents service and its workflow processes.

A process first gets one `Load` and answers with `WorkflowLoaded`; then it answers every `Run` with a
`WorkflowEnd`.
"""

from typing import Any

import msgspec


class Load(msgspec.Struct, frozen=True):
    """Make the workflow."""

    agent: str
    kwargs: dict[str, Any]
    http_library: str


class WorkflowLoaded(msgspec.Struct, frozen=True):
    """Answer to `Load`; `error` tells the user why the workflow could not be made."""

    error: str = ""


class Run(msgspec.Struct, frozen=True):
    """Play an episode."""

    data: dict[str, Any]
    base_url: str
    api_key: str
