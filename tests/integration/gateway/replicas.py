"""Several replicas of a gateway, and a Redis that a test may stop."""

from __future__ import annotations

import signal
from pathlib import Path

import httpx2

from tailrace.store import Blobs, connect
from tailrace_protos.session import SessionOpened
from tests.world.byte_model import model_card
from tests.world.gateway import GatewayWorld
from tests.world.servers import ServerProcess, make_redis_server


async def two_replicas(
    world: GatewayWorld, opened: SessionOpened
) -> tuple[httpx2.AsyncClient, httpx2.AsyncClient]:
    """Return a client of the replica that opened the session, and one of a replica that does not know
    it."""
    await world.start_gateway("gateway-1")
    first = world.http(opened)
    url = await other_url(world, opened.base_url)
    other = httpx2.AsyncClient(base_url=url, headers=first.headers, timeout=60.0)
    world.stack.push_async_callback(other.aclose)
    return first, other


async def other_url(world: GatewayWorld, base_url: str) -> str:
    """Return the address of the other replica."""
    for number in range(100):
        opened = await world.open(f"probe.{number}")
        if opened.base_url != base_url:
            return opened.base_url
    raise AssertionError("only one replica answers")


async def with_own_redis(world: GatewayWorld, folder: Path) -> ServerProcess:
    """Give the world's gateways a Redis that a test may stop."""
    world.redis_server = own = make_redis_server(folder)
    own.start()
    world.stack.callback(own.kill)
    redis = await connect(own.url)
    world.stack.push_async_callback(redis.aclose)
    await Blobs(redis, world.run).put_model_card(model_card())
    return own


def stop(server: ServerProcess, world: GatewayWorld) -> None:
    """Stop a server for at most the rest of the test."""
    assert server.process is not None
    server.process.send_signal(signal.SIGSTOP)
    world.stack.callback(server.process.send_signal, signal.SIGCONT)
