"""Registration of tool workers as NATS micro services, and search for tools by `$SRV.INFO`.

A worker has one endpoint for itself and one for each tool. Invariant: after `drain_tools` a worker
receives no new calls, and still receives messages for itself.
"""

import asyncio
import hashlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import msgspec
import nats.micro
from nats.micro.request import Request
from nats.micro.service import EndpointStats as MicroStats
from nats.micro.service import Service as MicroService

from tailrace.bus import Bus, flush
from tailrace.config import ConfigError
from tailrace.log import get_logger
from tailrace.sdk.tool import ToolSpec
from tailrace.tools.episode_tools import SchemaMismatchError, ToolsMissingError
from tailrace.tools.port import ToolPort
from tailrace_protos import subjects
from tailrace_protos.chat import ToolSchema

log = get_logger(__name__)

SERVICE_NAME = "tool_worker"  # the micro service's, in every language
ROUND_S = 0.5
LISTING_S = 5.0  # for the first worker of a listing that somebody serves
STALL_S = 0.3  # between two answers of a listing: workers on a busy machine answer late
CONTRACT_VERSION = "1.0.0"
OWN_ENDPOINT = "worker"
Handler = Callable[[Request], Awaitable[None]]


class EndpointInfo(msgspec.Struct, frozen=True):
    """Endpoint in an answer of `$SRV.INFO`."""

    subject: str
    metadata: dict[str, str] | None = None

    @property
    def is_tool(self) -> bool:
        """True for the endpoint of a tool, False for that of a worker."""
        return "tool" in (self.metadata or {})

    @property
    def tool(self) -> ToolSchema:
        """Schema of the tool; `msgspec.DecodeError` if it is not JSON."""
        metadata = self.metadata or {}
        parameters = msgspec.json.decode(metadata.get("schema") or "{}", type=dict[str, Any])
        default: dict[str, Any] = {"type": "object", "properties": {}}
        return ToolSchema(metadata["tool"], metadata.get("description", ""), parameters or default)


class WorkerInfo(msgspec.Struct, frozen=True):
    """Worker in an answer of `$SRV.INFO`."""

    id: str  # of the micro service
    endpoints: tuple[EndpointInfo, ...] = ()
    metadata: dict[str, str] | None = None


class ToolEndpointStats(msgspec.Struct, frozen=True):
    """Endpoint in an answer of `$SRV.STATS`; `data` is specific to tool workers."""

    subject: str
    num_requests: int = 0
    data: dict[str, Any] | None = None


class WorkerStats(msgspec.Struct, frozen=True):
    """Worker in an answer of `$SRV.STATS`."""

    id: str
    endpoints: tuple[ToolEndpointStats, ...] = ()


class Discovery:
    """Search for the tools of one run: tools of the run win over tools for all runs.

    `pins`: hashes by tool name; a pinned tool has this schema or none.
    """

    def __init__(self, port: ToolPort, run: str, pins: Mapping[str, str] | None = None) -> None:
        self._port = port
        self._run = run
        self._pins = pins or {}

    async def workers(self) -> list[WorkerInfo]:
        """Returns all tool workers, also those of other runs; without any, at once.

        Their number is known to nobody: it waits until none has answered for `STALL_S`.
        """
        found: list[WorkerInfo] = []

        def take(data: bytes) -> bool:
            _keep(data, WorkerInfo, found)
            return False

        await self._port.gather(f"$SRV.INFO.{SERVICE_NAME}", LISTING_S, take, STALL_S)
        return found

    async def stats(self, workers: Sequence[WorkerInfo]) -> dict[str, WorkerStats]:
        """Returns the load of `workers` by micro service id, as soon as all of them have answered."""
        awaited = {worker.id for worker in workers}
        found: list[WorkerStats] = []

        def take(data: bytes) -> bool:
            _keep(data, WorkerStats, found)
            return awaited <= {worker.id for worker in found}

        if awaited:
            await self._port.gather(f"$SRV.STATS.{SERVICE_NAME}", ROUND_S, take)
        return {worker.id: worker for worker in found}

    async def schemas(self, names: Sequence[str], wait_s: float) -> tuple[ToolSchema, ...]:
        """Returns the schemas of `names`, in order.

        Raises `ToolsMissingError` for a tool without a worker, and `SchemaMismatchError` for a pinned
        tool that a worker serves with another schema, both after `wait_s`.
        """
        loop = asyncio.get_running_loop()
        end_s = loop.time() + wait_s
        found: dict[str, ToolSchema] = {}
        while True:
            served = await self._round(names)
            found |= served.schemas(self._pins)
            missing = [name for name in names if name not in found]
            mismatch = self._mismatch(names, served)
            if not missing and mismatch is None:
                return tuple(found[name] for name in names)
            if loop.time() > end_s:
                raise mismatch or ToolsMissingError(missing, list(found), wait_s)
            await asyncio.sleep(0.1)

    async def _round(self, names: Sequence[str]) -> "_Served":
        """Asks once; ends early when the run itself serves all tools and none of them is pinned."""
        served = _Served(self._run)

        def take(data: bytes) -> bool:
            workers: list[WorkerInfo] = []
            _keep(data, WorkerInfo, workers)
            for endpoint in (endpoint for worker in workers for endpoint in worker.endpoints):
                if endpoint.is_tool:
                    served.add(endpoint)
            return bool(names) and all(name in served.own and name not in self._pins for name in names)

        await self._port.gather(f"$SRV.INFO.{SERVICE_NAME}", ROUND_S, take)
        return served

    def _mismatch(self, names: Sequence[str], served: "_Served") -> SchemaMismatchError | None:
        for name in names:
            pinned = self._pins.get(name)
            others = sorted(served.of(name).keys() - {pinned})
            if pinned and others:
                return SchemaMismatchError(name, pinned, others)
        return None


class _Served:
    """Schemas of one round by tool and hash; those of the run win over those for all runs."""

    def __init__(self, run: str) -> None:
        self._run = run
        self.own: dict[str, dict[str, ToolSchema]] = {}
        self._shared: dict[str, dict[str, ToolSchema]] = {}

    def add(self, endpoint: EndpointInfo) -> None:
        """Adds a tool of a worker, unless it is another run's; warns of a second schema."""
        try:
            tool = endpoint.tool
        except (msgspec.DecodeError, RecursionError) as error:
            reason = str(error)
            log.error("tool without a valid schema ignored", subject=endpoint.subject, reason=reason)
            return
        places = {subjects.tool(tool.name): self._shared}
        if self._run:
            places[subjects.tool(tool.name, self._run)] = self.own
        if endpoint.subject not in places:
            return
        known = places[endpoint.subject].setdefault(tool.name, {})
        if known.setdefault(schema_hash(tool), tool) is tool and len(known) > 1:
            log.warning(
                "workers serve one tool with different schemas",
                subject=endpoint.subject,
                schemas=sorted(known),
                remedy="end the workers of the older schema",
            )

    def of(self, name: str) -> dict[str, ToolSchema]:
        """Returns the schemas of a tool by hash."""
        return self.own.get(name) or self._shared.get(name, {})

    def schemas(self, pins: Mapping[str, str]) -> dict[str, ToolSchema]:
        """Returns one schema of each tool: the pinned one, or the first."""
        served = {name: self.of(name) for name in (*self._shared, *self.own)}
        chosen = {name: pins.get(name) or next(iter(known)) for name, known in served.items()}
        return {name: served[name][key] for name, key in chosen.items() if key in served[name]}


def schema_hash(tool: ToolSchema) -> str:
    """Eight letters that tell schemas of one tool apart: name, description and parameters."""
    content = msgspec.json.encode([tool.name, tool.description, tool.parameters], order="sorted")
    return hashlib.blake2b(content, digest_size=4).hexdigest()


def _keep(data: bytes, kind: Any, into: list[Any]) -> None:
    try:
        into.append(msgspec.json.decode(data, type=kind))
    except msgspec.DecodeError as error:
        log.error("malformed answer to discovery ignored", reason=str(error))


class Registration:
    """Endpoints of one worker; `load` returns its data for `$SRV.STATS`."""

    def __init__(self, bus: Bus, worker_id: str, run: str, load: Callable[[], dict[str, int]]) -> None:
        self._bus = bus
        self._worker_id = worker_id
        self._run = run
        self._load = load
        self._micro: MicroService | None = None

    async def enter(self, specs: Sequence[ToolSpec], handler: Handler) -> None:
        """Registers the worker; `handler` receives its requests."""
        client = self._bus.connection.client
        micro = self._micro = await nats.micro.add_service(
            client,
            name=SERVICE_NAME,
            version=CONTRACT_VERSION,
            description="Tailrace tool worker",
            metadata={"worker_id": self._worker_id, "run": self._run},
            stats_handler=self._stats,
        )
        own = subjects.tool_worker(self._worker_id)
        await micro.add_endpoint(name=OWN_ENDPOINT, subject=own, handler=handler)
        for spec in specs:
            await micro.add_endpoint(
                name=spec.name,
                subject=subjects.tool(spec.name, self._run),
                handler=handler,
                metadata=endpoint_metadata(spec),
            )
        await flush(client)
        if denied := self._bus.connection.denied:
            names = ", ".join(spec.name for spec in specs)
            raise ConfigError(
                f"NATS does not let this user serve {names} ({denied[0]}): give the credentials of a "
                "user that may"
            )

    async def drain_tools(self) -> None:
        """Removes the endpoints of tools; the endpoint of the worker stays."""
        micro = self._micro
        for endpoint in list(micro._endpoints) if micro else ():
            if micro and endpoint._name != OWN_ENDPOINT and endpoint._subscription is not None:
                await self._bus.connection.drain(endpoint._subscription)
                micro._endpoints.remove(endpoint)

    async def leave(self) -> None:
        """Removes the worker. (`stop` of nats-py fails after a drain, and without a server.)"""
        micro, self._micro = self._micro, None
        if micro is not None:
            endpoints = [endpoint._subscription for endpoint in micro._endpoints]
            for subscription in (*endpoints, *micro._subscriptions.values()):
                if subscription is not None:
                    await self._bus.connection.drain(subscription)

    def _stats(self, _of: MicroStats) -> dict[str, Any]:
        return self._load()


def endpoint_metadata(spec: ToolSpec) -> dict[str, str]:
    """Metadata of a tool for `$SRV.INFO`; NATS accepts only strings."""
    return {
        "tool": spec.name,
        "description": spec.description,
        "schema": msgspec.json.encode(spec.schema.parameters).decode(),
        "is_idempotent": str(spec.is_idempotent).lower(),
        "is_stateful": str(spec.is_stateful).lower(),
        "timeout_s": f"{spec.timeout_s:g}",
    }
