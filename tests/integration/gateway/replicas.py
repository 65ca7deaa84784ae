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
    """A client of the replica that opened the session and one of a replica that never heard of it."""
    await world.start_gateway("gateway-1")
    first = world.http(opened)
    url = await other_url(world, opened.base_url)
    other = httpx2.AsyncClient(base_url=url, headers=first.headers, timeout=20.0)
    world.stack.push_async_callback(other.aclose)
    return first, other


async def other_url(world: GatewayWorld, base_url: str) -> str:
    """The address of the replica that did not answer before."""
    for number in range(100):
        opened = await world.open(f"probe.{number}")
        if opened.base_url != base_url:
            return opened.base_url
    raise AssertionError("only one replica answers")


async def with_own_redis(world: GatewayWorld, folder: Path) -> ServerProcess:
    """Let the world's gateways use a Redis that a test may stop."""
    world.redis_server = own = make_redis_server(folder)
    own.start()
    world.stack.callback(own.kill)
    redis = await connect(own.url)
    world.stack.push_async_callback(redis.aclose)
    await Blobs(redis, world.run).put_model_card(model_card())
    return own


def stop(server: ServerProcess, world: GatewayWorld) -> None:
    """Let a server hang, at most to the test's end."""
    assert server.process is not None
    server.process.send_signal(signal.SIGSTOP)
    world.stack.callback(server.process.send_signal, signal.SIGCONT)
