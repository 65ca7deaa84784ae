"""Which tools there are: NATS micro's own discovery, `$SRV.INFO` and `$SRV.STATS`, read as tools."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import msgspec

from tailrace.log import get_logger
from tailrace.tools.errors import ToolsMissingError
from tailrace.tools.port import ToolPort
from tailrace_protos import subjects
from tailrace_protos.chat import ToolSchema

log = get_logger(__name__)

SERVICE_NAME = "tool_worker"  # the micro service's, in every language
ROUND_S = 0.5


class EndpointInfo(msgspec.Struct, frozen=True):
    """What `$SRV.INFO` says of an endpoint."""

    subject: str
    metadata: dict[str, str] | None = None

    @property
    def is_tool(self) -> bool:
        """Whether calls of a tool come here, and not what is for one worker."""
        return "tool" in (self.metadata or {})

    @property
    def tool(self) -> ToolSchema:
        """The tool behind it; `msgspec.DecodeError` if its schema is no JSON."""
        said = self.metadata or {}
        parameters = msgspec.json.decode(said.get("schema") or "{}", type=dict[str, Any])
        default: dict[str, Any] = {"type": "object", "properties": {}}
        return ToolSchema(said["tool"], said.get("description", ""), parameters or default)


class WorkerInfo(msgspec.Struct, frozen=True):
    """What `$SRV.INFO` says of a worker."""

    id: str  # of the micro service
    endpoints: tuple[EndpointInfo, ...] = ()
    metadata: dict[str, str] | None = None


class EndpointStats(msgspec.Struct, frozen=True):
    """What `$SRV.STATS` says of an endpoint; `data` is the worker's own."""

    subject: str
    num_requests: int = 0
    data: dict[str, Any] | None = None


class WorkerStats(msgspec.Struct, frozen=True):
    """What `$SRV.STATS` says of a worker."""

    id: str
    endpoints: tuple[EndpointStats, ...] = ()


class Discovery:
    """Finds tools for one run: its own win over those for everybody."""

    def __init__(self, port: ToolPort, run: str) -> None:
        self._port = port
        self._run = run

    async def workers(self, within_s: float = ROUND_S) -> list[WorkerInfo]:
        """Every tool worker that answers in time, also those of other runs."""
        found: list[WorkerInfo] = []

        def take(data: bytes) -> bool:
            _keep(data, WorkerInfo, found)
            return False

        await self._port.gather(f"$SRV.INFO.{SERVICE_NAME}", within_s, take)
        return found

    async def stats(self, within_s: float = ROUND_S) -> dict[str, WorkerStats]:
        """Load of every tool worker that answers in time, by the id of its micro service."""
        found: list[WorkerStats] = []

        def take(data: bytes) -> bool:
            _keep(data, WorkerStats, found)
            return False

        await self._port.gather(f"$SRV.STATS.{SERVICE_NAME}", within_s, take)
        return {worker.id: worker for worker in found}

    async def schemas(self, names: Sequence[str], wait_s: float) -> tuple[ToolSchema, ...]:
        """The schemas of `names`, in that order; `ToolsMissingError` after `wait_s`."""
        loop = asyncio.get_running_loop()
        end_s = loop.time() + wait_s
        found: dict[str, ToolSchema] = {}
        while True:
            await self._round(names, found)
            missing = [name for name in names if name not in found]
            if not missing:
                return tuple(found[name] for name in names)
            if loop.time() > end_s:
                raise ToolsMissingError(missing, list(found), wait_s)
            await asyncio.sleep(0.1)

    async def _round(self, names: Sequence[str], found: dict[str, ToolSchema]) -> None:
        """Ask once; ends early when all are found for this very run."""
        wanted_own = {subjects.tool(name, self._run) for name in names} if self._run else set()
        own: dict[str, ToolSchema] = {}

        def take(data: bytes) -> bool:
            workers: list[WorkerInfo] = []
            _keep(data, WorkerInfo, workers)
            for endpoint in (endpoint for worker in workers for endpoint in worker.endpoints):
                if endpoint.is_tool:
                    _note(endpoint, wanted_own, own, found)
            return bool(names) and all(name in own for name in names)

        await self._port.gather(f"$SRV.INFO.{SERVICE_NAME}", ROUND_S, take)
        found.update(own)


def _note(
    endpoint: EndpointInfo,
    wanted_own: set[str],
    own: dict[str, ToolSchema],
    found: dict[str, ToolSchema],
) -> None:
    try:
        tool = endpoint.tool
    except msgspec.DecodeError as error:
        log.error("tool without a valid schema ignored", subject=endpoint.subject, reason=str(error))
        return
    if endpoint.subject in wanted_own:
        own[tool.name] = tool
    elif endpoint.subject == subjects.tool(tool.name):
        found[tool.name] = tool


def _keep(data: bytes, kind: Any, into: list[Any]) -> None:
    try:
        into.append(msgspec.json.decode(data, type=kind))
    except msgspec.DecodeError as error:
        log.error("malformed answer to discovery ignored", reason=str(error))
