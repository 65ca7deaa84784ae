"""`EpisodeTools`: the tools of one episode, for agent loops.

A `CallRunner` runs the calls: over NATS or in this process.
"""

import asyncio
import itertools
import uuid
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Protocol

import msgspec

from tailrace.sdk.tool import ArgumentsError
from tailrace.tools import metrics
from tailrace.tools.conversion import error_result, outcome_of, parse_arguments
from tailrace_protos.chat import ToolCall, ToolSchema
from tailrace_protos.tool import CallTool, ToolErrorKind, ToolResult


class ToolsMissingError(LookupError):
    """No worker serves some of the requested tools `names`; `found` are the served tools."""

    def __init__(self, names: Sequence[str], found: Sequence[str], waited_s: float) -> None:
        known = ", ".join(sorted(found)) or "no tool at all"
        super().__init__(
            f"no worker serves {', '.join(names)} (waited {waited_s:g} s; {known} is served): start "
            "one with `tailrace tools serve module:tool`, or correct the name"
        )
        self.names = tuple(names)
        self.found = tuple(found)


class SchemaMismatchError(LookupError):
    """Workers serve the tool `name` with the schemas `served`, and not with the `pinned` one alone."""

    def __init__(self, name: str, pinned: str, served: Sequence[str]) -> None:
        super().__init__(
            f"tool {name!r} is pinned to schema {pinned}, and a worker serves schema "
            f"{', '.join(served)}: end the workers of the other schema (`tailrace tools ls` shows "
            f"them), or pin the new one with agents.tool_schemas.{name}"
        )
        self.name = name
        self.pinned = pinned
        self.served = tuple(served)


class CallRunner(Protocol):
    """Runner of tool calls."""

    async def schemas(self, names: Sequence[str]) -> tuple[ToolSchema, ...]:
        """Returns the schemas of `names`, in order; raises `ToolsMissingError`."""

    async def run_call(self, request: CallTool) -> ToolResult:
        """Runs a call; the result also reports failures."""

    async def release(self, session_id: str) -> None:
        """Releases the objects of a session."""

    def is_stateful(self, name: str) -> bool:
        """True if a tool keeps an object per episode; known after its first call."""


class EpisodeTools:
    """Tools of one episode; as an async context manager it releases their objects once, at the end."""

    def __init__(
        self,
        runner: CallRunner,
        run: str,
        episode_id: str,
        names: Sequence[str],
        create_kwargs: Mapping[str, dict[str, Any]] | None = None,
    ) -> None:
        self.names = tuple(names)
        self._runner = runner
        self._run = run
        self._episode_id = episode_id
        self._create_kwargs = create_kwargs or {}
        self._session_id = uuid.uuid4().hex
        self._numbers = itertools.count()
        self._has_called = False

    async def __aenter__(self) -> "EpisodeTools":
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.release()

    async def schemas(self) -> tuple[ToolSchema, ...]:
        """Returns the schemas for the model; `ToolsMissingError` if a tool is not served."""
        return await self._runner.schemas(self.names)

    async def call(self, call: ToolCall, timeout_s: float | None = None) -> ToolResult:
        """Runs a call of the model; a cancellation also cancels it at its worker.

        `timeout_s` limits the tool's code if the tool's own limit is longer. Never raises for the
        model's text or the tool's failure: see `is_error` and `infra_error` of the result.
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
        """True if a tool keeps an object for this episode; known after its first call."""
        return self._runner.is_stateful(name)

    async def release(self) -> None:
        """Releases the tools of the episode; idempotent."""
        if self._has_called:
            self._has_called = False
            await self._runner.release(self._session_id)

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
        return await self._runner.run_call(msgspec.structs.replace(request, arguments=arguments))
