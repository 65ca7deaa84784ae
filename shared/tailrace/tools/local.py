"""`LocalTools`: tools in this very process, for debugging and tests; a run's tools are behind NATS."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tailrace.sdk.tool import AnyTool
from tailrace.tools.episode_tools import EpisodeTools
from tailrace.tools.errors import ToolsMissingError
from tailrace.tools.host import DEFAULT_MAX_CONCURRENCY, ToolHost
from tailrace_protos.chat import ToolSchema
from tailrace_protos.tool import CallTool, ToolResult


class LocalTools:
    """What `ToolClient` does, without NATS."""

    def __init__(
        self, tools: Sequence[AnyTool], max_concurrency: int = DEFAULT_MAX_CONCURRENCY
    ) -> None:
        self._host = ToolHost(tools, max_concurrency)

    def session(
        self,
        episode_id: str,
        names: Sequence[str],
        *,
        create_kwargs: Mapping[str, dict[str, Any]] | None = None,
    ) -> EpisodeTools:
        """The tools of one episode; `create_kwargs` by tool name."""
        return EpisodeTools(self, "", episode_id, names, create_kwargs)

    async def schemas(self, names: Sequence[str]) -> tuple[ToolSchema, ...]:
        """The schemas of `names`, in that order; raises `ToolsMissingError`."""
        known = {spec.name: spec.schema for spec in self._host.specs}
        missing = [name for name in names if name not in known]
        if missing:
            raise ToolsMissingError(missing, list(known), 0.0)
        return tuple(known[name] for name in names)

    async def carry(self, request: CallTool) -> ToolResult:
        """Run a call here."""
        await self.schemas([request.name])
        self._host.open(request)
        return await self._host.run(request)

    def is_stateful(self, name: str) -> bool:
        """See `Carrier`."""
        return any(spec.name == name and spec.is_stateful for spec in self._host.specs)

    async def release(self, session_id: str) -> None:
        """Release the session's objects."""
        await self._host.release(session_id)

    async def close(self) -> None:
        """Release everything."""
        await self._host.release_all()
