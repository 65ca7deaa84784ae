"""A worker's place in NATS: its micro service, an endpoint of its own, and one for each tool.

Invariant: after `drain_tools` no new call comes, while what is for this worker alone still does.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import msgspec
import nats.micro
from nats.micro.request import Request
from nats.micro.service import EndpointStats
from nats.micro.service import Service as MicroService

from tailrace.bus import Bus, flush
from tailrace.sdk.tool import ToolSpec
from tailrace.tools.discovery import SERVICE_NAME
from tailrace_protos import subjects

CONTRACT_VERSION = "1.0.0"
OWN_ENDPOINT = "worker"

Handler = Callable[[Request], Awaitable[None]]


class Registration:
    """The endpoints of one worker; `load` is what `$SRV.STATS` says of it."""

    def __init__(self, bus: Bus, worker_id: str, run: str, load: Callable[[], dict[str, int]]) -> None:
        self._bus = bus
        self._worker_id = worker_id
        self._run = run
        self._load = load
        self._micro: MicroService | None = None

    async def enter(self, specs: Sequence[ToolSpec], handler: Handler) -> None:
        """Be found; requests come to `handler` from here on."""
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

    async def drain_tools(self) -> None:
        """Hear of no new calls; what is for this worker alone still comes."""
        micro = self._micro
        for endpoint in list(micro._endpoints) if micro else ():
            if micro and endpoint._name != OWN_ENDPOINT and endpoint._subscription is not None:
                await self._bus.connection.drain(endpoint._subscription)
                micro._endpoints.remove(endpoint)

    async def leave(self) -> None:
        """Be found no more. (nats-py's own `stop` fails on what is drained, or without a server.)"""
        micro, self._micro = self._micro, None
        if micro is not None:
            endpoints = [endpoint._subscription for endpoint in micro._endpoints]
            for subscription in (*endpoints, *micro._subscriptions.values()):
                if subscription is not None:
                    await self._bus.connection.drain(subscription)

    def _stats(self, _of: EndpointStats) -> dict[str, Any]:
        return self._load()


def endpoint_metadata(spec: ToolSpec) -> dict[str, str]:
    """What `$SRV.INFO` says of a tool; NATS takes strings only."""
    return {
        "tool": spec.name,
        "description": spec.description,
        "schema": msgspec.json.encode(spec.schema.parameters).decode(),
        "is_idempotent": str(spec.is_idempotent).lower(),
        "is_stateful": str(spec.is_stateful).lower(),
        "timeout_s": f"{spec.timeout_s:g}",
    }
