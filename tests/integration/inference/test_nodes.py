"""Process of a node that only computes: ready with its engine's part, and gone with its leader."""

from __future__ import annotations

import asyncio
from typing import Any, ClassVar, NoReturn

import pytest

from tailrace.bus import Bus
from tailrace.config import ConfigError, Endpoints, RunConfig
from tailrace.runtime import Args, Service
from tailrace.store import Blobs, StoreConnection
from tailrace_inference.__main__ import build
from tailrace_inference.adapters import engines
from tailrace_inference.adapters.node_link import Node
from tailrace_inference.config import InferenceConfig
from tailrace_inference.ports import EngineFailedError
from tailrace_protos.control import ServerStatus
from tailrace_protos.weights import ModelCard
from tests.world.serving import eventually, serving

CARD = ModelCard(b"{}", {})
SECTION = {"engine": "vllm", "num_nodes": 2, "tensor_parallel_size": 2, "drain_s": 30.0}


class LonelyFollower:
    """A follower without an engine; its leader ends when the test says so."""

    made: ClassVar[list[LonelyFollower]] = []

    def __init__(self, card: ModelCard, config: InferenceConfig, node: Node) -> None:
        self.card, self.node = card, node
        self.leader_came, self.leader_ended = asyncio.Event(), asyncio.Event()
        self.is_closed = False
        self.made.append(self)

    async def start(self) -> None:
        await self.leader_came.wait()

    async def watch(self) -> NoReturn:
        await self.leader_ended.wait()
        raise EngineFailedError("the leader of this server is lost")

    async def close(self) -> None:
        self.is_closed = True


@pytest.fixture(autouse=True)
def _follower_class(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(engines._FOLLOWERS, "vllm", f"{__name__}:LonelyFollower")
    monkeypatch.setenv("TAILRACE_NODE_RANK", "1")
    monkeypatch.setenv("TAILRACE_MASTER", "127.0.0.1:29500")
    LonelyFollower.made.clear()


def make(run: str, endpoints: Endpoints, **section: Any) -> Service:
    experiment = {"exp_name": run, "inference": SECTION | section}
    return build(Args("run.yaml", "pool-0-1", experiment, RunConfig(exp_name=run), endpoints))


async def made() -> LonelyFollower:
    await eventually(lambda: bool(LonelyFollower.made))
    return LonelyFollower.made[0]


async def test_a_follower_is_no_server_and_fails_with_its_leader(
    run_bus: Bus, redis: StoreConnection, endpoints: Endpoints
) -> None:
    servers: list[ServerStatus] = []

    async def on_status(status: ServerStatus) -> None:
        servers.append(status)

    await run_bus.registry.watch(on_status)
    await Blobs(redis, run_bus.run).put_model_card(CARD)
    async with serving(make(run_bus.run, endpoints)) as task:
        follower = await made()
        assert (follower.card, follower.node) == (CARD, Node(2, 1, "127.0.0.1", 29500))
        follower.leader_came.set()
        follower.leader_ended.set()
        assert await task == 1
    assert follower.is_closed
    assert not servers


async def test_it_is_ready_once_it_computes(
    run_bus: Bus, redis: StoreConnection, endpoints: Endpoints
) -> None:
    await Blobs(redis, run_bus.run).put_model_card(CARD)
    service = make(run_bus.run, endpoints)
    async with serving(service):
        follower = await made()
        assert not service._ready
        follower.leader_came.set()
        await eventually(lambda: bool(service._ready))
        follower.leader_ended.set()


async def test_a_stopped_group_computes_until_the_leader_has_drained(
    run_bus: Bus, redis: StoreConnection, endpoints: Endpoints
) -> None:
    await Blobs(redis, run_bus.run).put_model_card(CARD)
    service = make(run_bus.run, endpoints)
    async with serving(service) as task:
        follower = await made()
        follower.leader_came.set()
        await eventually(lambda: bool(service._ready))
        service.stop("SIGTERM")
        await eventually(lambda: not service._ready)  # the drain has begun
        assert not follower.is_closed
        follower.leader_ended.set()
        assert await task == 0, "as it was told"
    assert follower.is_closed


async def test_one_that_waits_for_its_leader_stops_at_once(
    run_bus: Bus, redis: StoreConnection, endpoints: Endpoints
) -> None:
    await Blobs(redis, run_bus.run).put_model_card(CARD)
    service = make(run_bus.run, endpoints)
    async with serving(service) as task:
        follower = await made()
        service.stop("SIGTERM")
        async with asyncio.timeout(60):
            assert await task == 0
    assert follower.is_closed


def test_a_node_without_its_place_is_refused(
    run_name: str, endpoints: Endpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TAILRACE_NODE_RANK")
    with pytest.raises(ConfigError, match="TAILRACE_NODE_RANK"):
        make(run_name, endpoints)
