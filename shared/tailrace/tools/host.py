"""`ToolHost`: runs the calls of tools in this process, and keeps their sessions.

Invariants: each call ends in a `ToolResult` or in its cancellation, never in an exception; at most
`max_concurrency` calls run at once, the others wait in order. Of a stateful tool, `create` ends before
the first `execute`; one `execute` runs at a time, in the order of the calls; `release` runs once for
each object whose `create` began, after its last `execute` ended or was cancelled.
"""

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import msgspec

from tailrace.foreign import ForeignCodeError
from tailrace.log import get_logger
from tailrace.sdk.tool import (
    AnyTool,
    ArgumentsError,
    FunctionTool,
    Tool,
    ToolOffer,
    ToolSession,
    ToolSpec,
    as_offer,
)
from tailrace.tools import metrics
from tailrace.tools.conversion import (
    BrokenSchemaError,
    Check,
    checker,
    error_result,
    failure_of,
    infra_result,
    outcome_of,
    result_of,
)
from tailrace.tools.episode_tools import EpisodeTools, ToolsMissingError
from tailrace.tools.running import ToolRunner, ToolTimeoutError
from tailrace_protos.chat import ToolSchema
from tailrace_protos.tool import CallTool, ToolErrorKind, ToolResult

log = get_logger(__name__)

RELEASE_TIMEOUT_S = 10.0


class ToolSessionError(Exception):
    """The session has no object: it was never created, or is released. The text gives the reason."""


class SessionTool:
    """Tool object of one episode."""

    def __init__(self, offer: ToolOffer, session: ToolSession, runner: ToolRunner) -> None:
        self.session = session
        self._spec = offer.spec
        self._runner = runner
        self._turn = asyncio.Lock()
        self._tool: Tool | None = None
        self._is_released = False
        self._creating = asyncio.create_task(self._create(offer), name=f"create {offer.spec.name}")
        metrics.SESSIONS.inc()

    async def execute(self, arguments: dict[str, Any], timeout_s: float) -> Any:
        """Runs one call; raises `ToolSessionError`, `ForeignCodeError`, `ToolTimeoutError`."""
        await asyncio.wait({self._creating})
        if not self._creating.cancelled() and self._creating.result():
            raise ToolSessionError(self._creating.result())
        async with self._turn:
            tool = self._tool
            if tool is None or self._is_released:
                raise ToolSessionError(f"the session of {self._spec.name} was released")
            return await self._runner.call(self._spec.name, lambda: tool.execute(arguments), timeout_s)

    async def release(self) -> None:
        """Releases the object once; the calls must be cancelled before."""
        if self._is_released:
            return
        self._is_released = True
        metrics.SESSIONS.dec()
        self._creating.cancel()
        await asyncio.wait({self._creating})
        async with self._turn:
            tool, self._tool = self._tool, None
            if tool is None:
                return
            try:
                await self._runner.call(self._spec.name, tool.release, RELEASE_TIMEOUT_S)
            except (ForeignCodeError, ToolTimeoutError) as error:
                log.error(
                    "release failed",
                    tool=self._spec.name,
                    episode_id=self.session.episode_id,
                    reason=str(error),
                )

    async def _create(self, offer: ToolOffer) -> str:
        """Creates the object; returns the reason of a failure, or an empty string."""
        name = self._spec.name

        async def create() -> None:
            self._tool = offer()
            await self._tool.create(self.session)

        try:
            await self._runner.call(name, create, self._spec.timeout_s)
        except (ForeignCodeError, ToolTimeoutError) as error:
            log.error("create failed", tool=name, episode_id=self.session.episode_id, reason=str(error))
            return f"{name}.create failed: {error}"
        return ""


DEFAULT_MAX_CONCURRENCY = 64


class ToolHost:
    """Tools of one process."""

    def __init__(
        self, tools: Sequence[AnyTool], max_concurrency: int = DEFAULT_MAX_CONCURRENCY
    ) -> None:
        if max_concurrency < 1:
            raise ValueError(f"max_concurrency must be at least 1, found {max_concurrency}")
        offers = [as_offer(tool) for tool in tools]
        self._offers = {offer.spec.name: offer for offer in offers}
        if len(self._offers) < len(offers):
            raise ValueError(
                f"tools need different names, found {[offer.spec.name for offer in offers]}"
            )
        self._checks: dict[str, Check] = {name: checker(offer) for name, offer in self._offers.items()}
        self._shared: dict[str, Tool] = {}
        self._sessions: dict[tuple[str, str], SessionTool] = {}
        self._leaving: dict[asyncio.Task[None], str] = {}  # releases that have not ended, by session
        self._slots = asyncio.Semaphore(max_concurrency)
        self._runner = ToolRunner()
        self.max_concurrency = max_concurrency
        self.num_running = 0

    @property
    def specs(self) -> tuple[ToolSpec, ...]:
        """Specifications of the tools here."""
        return tuple(offer.spec for offer in self._offers.values())

    @property
    def num_abandoned(self) -> int:
        """Number of abandoned calls whose code still runs."""
        return self._runner.num_abandoned

    @property
    def session_ids(self) -> set[str]:
        """Sessions with objects."""
        return {session_id for session_id, _ in self._sessions}

    def spec(self, name: str) -> ToolSpec | None:
        """Returns the specification of a tool, or None if it is not here."""
        offer = self._offers.get(name)
        return offer.spec if offer else None

    @property
    def num_objects(self) -> int:
        """Number of objects of stateful tools, also of those whose release has not ended."""
        return len(self._sessions) + len(self._leaving)

    def opens(self, request: CallTool) -> bool:
        """Tells whether a call needs a new object of a stateful tool."""
        is_new = (request.session_id, request.name) not in self._sessions
        return request.opens_session and is_new and self._offers[request.name].spec.is_stateful

    def open(self, request: CallTool) -> None:
        """Starts to create the object of a stateful tool, if this call opens a session."""
        offer = self._offers[request.name]
        if self.opens(request) and isinstance(offer, ToolOffer):
            session = ToolSession(
                request.session_id, request.episode_id, request.run, request.create_kwargs
            )
            key = (request.session_id, request.name)
            self._sessions[key] = SessionTool(offer, session, self._runner)

    async def run(self, request: CallTool) -> ToolResult:
        """Returns the result of a call, after `open` for it."""
        started_s = asyncio.get_running_loop().time()
        outcome = "cancelled"
        try:
            result = await self._run(request)
            outcome = outcome_of(result)
        finally:
            elapsed_s = asyncio.get_running_loop().time() - started_s
            metrics.CALLS.labels(request.name, outcome).inc()
            metrics.CALL_SECONDS.labels(request.name).observe(elapsed_s)
        return msgspec.structs.replace(result, elapsed_s=elapsed_s)

    async def release(self, session_id: str) -> None:
        """Releases all objects of a session, after the cancellation of its calls.

        The releases end also if this is cancelled.
        """
        for key in [key for key in self._sessions if key[0] == session_id]:
            leaving = asyncio.create_task(self._sessions.pop(key).release(), name=f"release {key[1]}")
            self._leaving[leaving] = session_id
            leaving.add_done_callback(self._leaving.pop)
        mine = [leaving for leaving, owner in self._leaving.items() if owner == session_id]
        await asyncio.gather(*map(asyncio.shield, mine))

    async def release_all(self) -> None:
        """Releases all objects; returns when no release is at work any more."""
        sessions = {*self.session_ids, *self._leaving.values()}
        await asyncio.gather(*(self.release(session_id) for session_id in sessions))

    async def _run(self, request: CallTool) -> ToolResult:
        offer = self._offers[request.name]
        try:
            arguments = self._checks[request.name](request.arguments)
        except ArgumentsError as error:
            return error_result(request, ToolErrorKind.INVALID_ARGUMENTS, f"invalid arguments: {error}")
        except BrokenSchemaError as error:
            return infra_result(request, f"{request.name}: {error}")
        room = offer.room if isinstance(offer, ToolOffer) else None
        async with room or nullcontext(), self._slots:
            self.num_running += 1
            metrics.RUNNING.inc()
            try:
                value = await self._execute(offer, request, arguments)
            except ToolSessionError as error:
                return infra_result(request, str(error))
            except (ForeignCodeError, ToolTimeoutError) as error:
                return failure_of(request, error)
            finally:
                self.num_running -= 1
                metrics.RUNNING.dec()
        return result_of(request, offer.spec, value)

    async def _execute(
        self, offer: FunctionTool | ToolOffer, request: CallTool, arguments: dict[str, Any]
    ) -> Any:
        timeout_s = offer.spec.timeout_s
        if request.timeout_s > 0:
            timeout_s = min(timeout_s, request.timeout_s)
        if isinstance(offer, FunctionTool):
            return await self._runner.call_function(offer, arguments, timeout_s)
        if offer.spec.is_stateful:
            found = self._sessions.get((request.session_id, request.name))
            if found is None:
                raise ToolSessionError(f"no session {request.session_id!r} of {request.name} here")
            return await found.execute(arguments, timeout_s)
        return await self._runner.call(
            request.name, lambda: self._stateless(offer).execute(arguments), timeout_s
        )

    def _stateless(self, offer: ToolOffer) -> Tool:
        """Returns the object of a tool without state."""
        name = offer.spec.name
        if name not in self._shared:
            self._shared[name] = offer()
        return self._shared[name]


class LocalTools:
    """`ToolClient` without NATS: tools in this process, for debugging and tests."""

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
        """Returns the tools of one episode; `create_kwargs` by tool name."""
        return EpisodeTools(self, "", episode_id, names, create_kwargs)

    async def schemas(self, names: Sequence[str]) -> tuple[ToolSchema, ...]:
        """Returns the schemas of `names`, in order; raises `ToolsMissingError`."""
        known = {spec.name: spec.schema for spec in self._host.specs}
        missing = [name for name in names if name not in known]
        if missing:
            raise ToolsMissingError(missing, list(known), 0.0)
        return tuple(known[name] for name in names)

    async def run_call(self, request: CallTool) -> ToolResult:
        """Runs a call in this process."""
        await self.schemas([request.name])
        self._host.open(request)
        return await self._host.run(request)

    def is_stateful(self, name: str) -> bool:
        """See `CallRunner`."""
        return any(spec.name == name and spec.is_stateful for spec in self._host.specs)

    async def release(self, session_id: str) -> None:
        """Releases the session's objects."""
        await self._host.release(session_id)

    async def close(self) -> None:
        """Releases all objects."""
        await self._host.release_all()
