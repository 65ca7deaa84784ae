"""`EpisodeTools`: the tools of one episode, as agent loops use them.

The same for tools behind NATS and for tools in this process; a `Carrier` makes the difference.
"""

from __future__ import annotations

import asyncio
import itertools
import uuid
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Protocol

import msgspec

from tailrace.sdk.tool import ArgumentsError
from tailrace.tools import metrics
from tailrace.tools.arguments import parse_arguments
from tailrace.tools.results import error_result, outcome_of
from tailrace_protos.chat import ToolCall, ToolSchema
from tailrace_protos.tool import CallTool, ToolErrorKind, ToolResult


class Carrier(Protocol):
    """Whoever runs calls."""

    async def schemas(self, names: Sequence[str]) -> tuple[ToolSchema, ...]:
        """The schemas of `names`, in that order; `ToolsMissingError` if there are none."""

    async def carry(self, request: CallTool) -> ToolResult:
        """Run a call; whatever goes wrong is in the result."""

    async def release(self, session_id: str) -> None:
        """End what the session's calls made."""

    def is_stateful(self, name: str) -> bool:
        """Whether a tool keeps an object per episode; known once it was called."""


class EpisodeTools:
    """Use as an async context manager: what calls made is released once, however the episode ends."""

    def __init__(
        self,
        carrier: Carrier,
        run: str,
        episode_id: str,
        names: Sequence[str],
        create_kwargs: Mapping[str, dict[str, Any]] | None = None,
    ) -> None:
        self.names = tuple(names)
        self._carrier = carrier
        self._run = run
        self._episode_id = episode_id
        self._create_kwargs = create_kwargs or {}
        self._session_id = uuid.uuid4().hex
        self._numbers = itertools.count()
        self._has_called = False

    async def __aenter__(self) -> EpisodeTools:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.release()

    async def schemas(self) -> tuple[ToolSchema, ...]:
        """What the model is told of the tools; `ToolsMissingError` if one is not served."""
        return await self._carrier.schemas(self.names)

    async def call(self, call: ToolCall, timeout_s: float | None = None) -> ToolResult:
        """Run a call that the model made; cancelling this cancels it at its worker.

        `timeout_s` bounds the tool's own code where the tool's own bound is longer. Never raises for
        what the model wrote or what the tool did: see `is_error` and `infra_error` of the result.
        """
        started_s = asyncio.get_running_loop().time()
        outcome = "cancelled"
        name = call.name if call.name in self.names else "unknown"
        try:
            result = await self._call(call, timeout_s or 0.0)
            outcome = outcome_of(result)
        finally:
            elapsed_s = asyncio.get_running_loop().time() - started_s
            metrics.CLIENT_CALLS.labels(name, outcome).inc()
            metrics.CLIENT_SECONDS.labels(name).observe(elapsed_s)
        return msgspec.structs.replace(result, call_id=call.id, elapsed_s=elapsed_s)

    def is_stateful(self, name: str) -> bool:
        """Whether a tool keeps an object for this episode; known once it was called."""
        return self._carrier.is_stateful(name)

    async def release(self) -> None:
        """End the episode's use of its tools; more than once does no harm."""
        if self._has_called:
            self._has_called = False
            await self._carrier.release(self._session_id)

    async def _call(self, call: ToolCall, timeout_s: float) -> ToolResult:
        request = CallTool(
            f"{self._session_id}.{next(self._numbers)}",
            call.name,
            run=self._run,
            episode_id=self._episode_id,
            timeout_s=timeout_s,
            session_id=self._session_id,
            opens_session=True,
            create_kwargs=dict(self._create_kwargs.get(call.name, {})),
        )
        if call.name not in self.names:
            known = ", ".join(self.names) or "none"
            text = f"there is no tool {call.name!r}; tools: {known}"
            return error_result(request, ToolErrorKind.UNKNOWN_TOOL, text)
        try:
            arguments = parse_arguments(call.arguments)
        except ArgumentsError as error:
            return error_result(request, ToolErrorKind.INVALID_ARGUMENTS, str(error))
        self._has_called = True
        return await self._carrier.carry(msgspec.structs.replace(request, arguments=arguments))
