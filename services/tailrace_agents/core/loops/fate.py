"""What ends a loop's episode, whatever the loop itself makes of the exception."""

from __future__ import annotations

from types import TracebackType

from tailrace.sdk.policy import GenerationFailedError
from tailrace_agents.core.episode import EpisodeHandedBackError
from tailrace_agents.ports import EpisodeTakenError


class ToolInfraError(Exception):
    """Nobody can tell what the tool would have said. Attributes: `tool`, `reason`."""

    def __init__(self, tool: str, reason: str) -> None:
        super().__init__(f"tool {tool}: {reason}")
        self.tool = tool
        self.reason = reason


Fatal = GenerationFailedError | EpisodeTakenError | EpisodeHandedBackError | ToolInfraError


class Fate:
    """Remembers the first fatal error of the calls made in `with fate:`; later calls get it too.

    A loop may catch an exception and go on: it cannot hide it from whoever plays it.
    """

    def __init__(self) -> None:
        self.error: Fatal | None = None

    def __enter__(self) -> None:
        if self.error is not None:
            raise self.error

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self.error is None and isinstance(error, Fatal):
            self.error = error
