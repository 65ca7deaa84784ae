"""The client side of the channel: a link per server, opened when needed, and their keepalives."""

from __future__ import annotations

import asyncio

from tailrace.channel.call import GenerateCall
from tailrace.channel.client_link import ClientLink, ClientTransport
from tailrace.channel.config import ClientChannelConfig
from tailrace.channel.errors import ChannelClosedError
from tailrace.channel.metrics import ChannelMetrics
from tailrace.channel.ports import Address, LinkLoss
from tailrace_protos.generation import GenerateRequest


class LinkedGenerateClient:
    """`GenerateClient` over any `ClientTransport`."""

    def __init__(self, transport: ClientTransport, config: ClientChannelConfig) -> None:
        self._transport = transport
        self._config = config
        self._metrics = ChannelMetrics("client")
        self._links: dict[Address, ClientLink] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._closed = False

    async def start(self) -> None:
        """Be ready for `generate`."""
        await self._transport.start()
        self._schedule_tick()

    def generate(self, address: Address, request: GenerateRequest) -> GenerateCall:
        """See `GenerateClient.generate`."""
        link = self._links.get(address)
        if link is None:
            link = self._open(address)
        return link.start(request)

    def _open(self, address: Address) -> ClientLink:
        if self._closed:
            raise ChannelClosedError
        link = ClientLink(address, self._transport, self._config, self._metrics, self._forget)
        self._links[address] = link
        return link

    def _forget(self, link: ClientLink) -> None:
        if self._links.get(link.address) is link:
            del self._links[link.address]

    def _schedule_tick(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(self._config.keepalive_s, self._tick)

    def _tick(self) -> None:
        self._schedule_tick()
        for link in list(self._links.values()):
            link.tick()

    async def close(self) -> None:
        """End every call here and at its server."""
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
        for link in list(self._links.values()):
            link.on_lost(LinkLoss.CLOSED, "the client was closed")
        await self._transport.close()
