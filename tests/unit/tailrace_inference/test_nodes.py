"""Nodes of one server: a leader and followers over real sockets, without an engine."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tailrace_inference.adapters.node_follower import LeaderLink
from tailrace_inference.adapters.node_group import NodeGroup, cause_of, gather_nodes
from tailrace_inference.adapters.node_link import Hello, LinkLostError, Node, NodeLink
from tailrace_inference.config import InferenceConfig
from tailrace_inference.ports import EngineFailedError, EngineRefusalError, NotStagedError

DEADLINE_S = 60.0


def nodes(num: int) -> list[Node]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
    return [Node(num, rank, "127.0.0.1", port) for rank in range(num)]


class Gathered:
    """A leader and its followers, joined."""

    def __init__(self, group: NodeGroup, links: list[LeaderLink], folder: Path) -> None:
        self.group, self.links, self.folder = group, links, folder
        self.tasks = [asyncio.create_task(link.obey()) for link in links]

    @classmethod
    async def of(cls, num: int, folder: Path) -> Gathered:
        leader, *others = nodes(num)
        for node in [leader, *others]:
            (folder / str(node.rank)).mkdir()
        links = [LeaderLink(node, folder / str(node.rank)) for node in others]
        joining = [asyncio.create_task(link.join()) for link in links]  # before the leader listens
        group, welcome = await gather_nodes(leader, lambda _: None)
        assert group is not None
        assert await asyncio.gather(*joining) == [welcome] * len(links)
        return cls(group, links, folder)

    async def give(self, policy_version: int, content: bytes) -> None:
        path = self.folder / "0" / f"{policy_version}.safetensors"
        path.write_bytes(content)
        await self.group.give(policy_version, path)

    def held(self, rank: int) -> dict[str, bytes]:
        return {path.name: path.read_bytes() for path in (self.folder / str(rank)).iterdir()}

    async def close(self) -> None:
        for task, link in zip(self.tasks, self.links, strict=True):
            task.cancel()
            link.close()
        await asyncio.wait(self.tasks)
        await self.group.close()


@pytest.fixture
async def three(tmp_path: Path) -> AsyncIterator[Gathered]:
    async with asyncio.timeout(DEADLINE_S):
        gathered = await Gathered.of(3, tmp_path)
    yield gathered
    await gathered.close()


async def test_every_follower_has_the_file_once_a_version_is_given(three: Gathered) -> None:
    contents = [os.urandom(size) for size in (3_000_000, 3_000_000, 10, 4_100_000)]
    for version, content in enumerate(contents):
        await three.give(version, content)
        names = [f"{each}.safetensors" for each in (version - 1, version) if each >= 0]
        for rank in (1, 2):
            held = three.held(rank)
            assert held == {name: contents[int(name[0])] for name in names}, "the newest two"


async def test_a_version_given_again_replaces_itself(three: Gathered) -> None:
    for content in (b"a" * 100, b"b" * 2_000_000, b"c" * 5):
        await three.give(7, content)
        assert three.held(1) == three.held(2) == {"7.safetensors": content}


async def test_a_follower_without_room_fails_the_version_and_stays(
    three: Gathered, monkeypatch: pytest.MonkeyPatch
) -> None:
    await three.give(0, b"zero")

    def full(*_: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "posix_fallocate", full)
        with pytest.raises(NotStagedError, match=r"version 1 not loaded: node \d: .*No space left"):
            await three.give(1, b"one")
    assert three.held(1)["0.safetensors"] == b"zero", "the active version"
    await three.give(2, b"two")
    assert three.held(1)["2.safetensors"] == b"two"


async def test_a_damaged_file_is_no_version(three: Gathered, monkeypatch: pytest.MonkeyPatch) -> None:
    given: Any = "tailrace_inference.adapters.node_group.xxhash.xxh3_64_intdigest"
    with monkeypatch.context() as patched:
        patched.setattr(given, lambda _, seed=[0]: seed.append(0) or len(seed))
        with pytest.raises(NotStagedError, match="ChecksumError"):
            await three.give(0, b"zero")
    assert "0.safetensors" not in three.held(1)


async def test_a_lost_follower_ends_the_group_and_what_waits(three: Gathered) -> None:
    three.links[1].close()
    async with asyncio.timeout(DEADLINE_S):
        reason = await asyncio.shield(three.group.lost)
        assert reason == "node 2 of this server is lost: the connection is closed"
        with pytest.raises(NotStagedError, match="node 2 of this server is lost"):
            await three.give(0, b"zero")


async def test_followers_end_with_the_leader(three: Gathered) -> None:
    await three.group.close()
    for task in three.tasks:
        with pytest.raises(EngineFailedError, match="the leader of this server is lost"):
            async with asyncio.timeout(DEADLINE_S):
                await task


async def test_a_silent_side_counts_as_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tailrace_inference.adapters.node_link._SILENT_S", 0.2)
    opened = asyncio.Event()

    async def say_nothing(*_: Any) -> None:
        opened.set()
        await asyncio.Event().wait()

    (node, _) = nodes(2)
    server = await asyncio.start_server(say_nothing, node.host, node.port)
    link = await NodeLink.connect(node)
    with pytest.raises(LinkLostError, match="silent for"):
        async with asyncio.timeout(DEADLINE_S):
            await link.receive()
    assert opened.is_set()
    link.close()
    server.close()


@pytest.mark.parametrize("hello", [Hello(0, 3), Hello(3, 3), Hello(1, 2), Hello(1, 3)], ids=str)
async def test_a_stranger_is_refused(hello: Hello, three: Gathered) -> None:
    stranger = await NodeLink.connect(three.group._node)
    await stranger.send(hello)
    with pytest.raises(LinkLostError):
        async with asyncio.timeout(DEADLINE_S):
            await stranger.receive()
    stranger.close()
    await three.give(0, b"zero")
    assert three.held(1) == three.held(2) == {"0.safetensors": b"zero"}


async def test_one_node_waits_for_nobody() -> None:
    group, welcome = await gather_nodes(Node(), lambda _: None)
    assert group is None
    assert welcome.seed >= 0


@pytest.mark.parametrize(
    ("env", "reason"),
    [
        ({}, "TAILRACE_NODE_RANK"),
        ({"TAILRACE_NODE_RANK": "2"}, "TAILRACE_NODE_RANK"),
        ({"TAILRACE_NODE_RANK": "1"}, "TAILRACE_MASTER"),
        ({"TAILRACE_NODE_RANK": "1", "TAILRACE_MASTER": "leader"}, "TAILRACE_MASTER"),
    ],
)
def test_a_node_without_its_place_is_refused(env: dict[str, str], reason: str) -> None:
    with pytest.raises(EngineRefusalError, match=reason):
        Node.from_env(2, env)


def test_a_node_reads_its_place() -> None:
    env = {"TAILRACE_NODE_RANK": "1", "TAILRACE_MASTER": "demo-0.demo.team:29500"}
    assert Node.from_env(2, env) == Node(2, 1, "demo-0.demo.team", 29500)
    assert Node.from_env(1, env) == Node()


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"num_nodes": 0}, "num_nodes must be at least 1"),
        ({"num_nodes": 2}, "the engine torch has one node"),
        ({"engine": "hf", "num_nodes": 2}, "the engine hf has one node"),
        ({"engine": "sglang", "num_nodes": 2, "tensor_parallel_size": 2}, "sglang has one node"),
        ({"engine": "vllm", "num_nodes": 2}, "tensor_parallel_size x pipeline_parallel_size is 1"),
        ({"engine": "vllm", "num_nodes": 2, "tensor_parallel_size": 3}, "make it a multiple"),
    ],
)
def test_nodes_that_an_engine_cannot_have_are_refused(settings: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        InferenceConfig(**settings)


async def test_a_failure_names_the_node_whose_loss_is_told_after_it(three: Gathered) -> None:
    cause = asyncio.create_task(cause_of("the core died", three.group))
    await asyncio.sleep(0)
    three.links[1].close()
    async with asyncio.timeout(DEADLINE_S):
        assert "node 2 of this server is lost" in await cause


async def test_a_failure_of_its_own_is_told_as_such(
    three: Gathered, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tailrace_inference.adapters.node_group._LOSS_TOLD_S", 0.1)
    assert await cause_of("the core died", three.group) == "the core died"
    assert await cause_of("the core died", None) == "the core died"
