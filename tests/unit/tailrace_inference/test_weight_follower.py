"""Weights of a server: bases before what adds to them, and failures after which it goes on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable

import pytest

from tailrace.bus import NoResponderError
from tailrace.config import ConfigError
from tailrace.runtime import StopService
from tailrace.weights import StagedWeights, WeightsUnreachableError
from tailrace_inference.adapters.weight_follower import WeightFollower
from tailrace_inference.ports import (
    EngineFailedError,
    EngineRefusalError,
    NamedTensor,
    WeightMismatchError,
)
from tailrace_protos.weights import (
    BaseWeights,
    WeightManifest,
    WeightsApplied,
    WeightsAvailable,
    WeightSource,
)

SOURCE = WeightSource("host", "", "")


class FakeEngine:
    """Takes whole versions, and adapters of the version that it has; `refused` fit no model."""

    def __init__(self) -> None:
        self.base_version = -1
        self.applied: list[int] = []
        self.refused: set[int] = set()
        self.error: Exception | None = None  # of the swap
        self.is_paused = False
        self.swapped = asyncio.Event()  # the new weights are in; unset, a swap waits for it
        self.swapped.set()
        self._staged = -1

    async def stage(
        self, tensors: Iterable[NamedTensor], policy_version: int, base_version: int | None = None
    ) -> None:
        if policy_version in self.refused or base_version not in (None, self.base_version):
            raise WeightMismatchError(policy_version, "it does not fit")
        self._staged = policy_version
        if base_version is None:
            self.base_version = policy_version

    async def apply(self) -> float:
        if self.error is not None:
            raise self.error
        self.is_paused = True
        await self.swapped.wait()
        self.is_paused = False
        self.applied.append(self._staged)
        return 0.0


class FakeReceiver:
    """Weights that come at once, or fail as `errors` says for their version, once each."""

    def __init__(self) -> None:
        self.errors: dict[int, Exception] = {}
        self.fetched: list[int] = []
        self.reports: asyncio.Queue[WeightsApplied] = asyncio.Queue()

    async def current(self, *, attempts: int) -> WeightsAvailable | None:
        raise NoResponderError("weight_sync")

    async def in_own_type(self, announced: WeightsAvailable) -> WeightsAvailable:
        return announced

    async def fetch(self, available: WeightsAvailable) -> StagedWeights:
        version = available.manifest.policy_version
        self.fetched.append(version)
        if version in self.errors:
            raise self.errors.pop(version)
        return StagedWeights(available.manifest, memoryview(b""), 0)

    async def report(self, applied: WeightsApplied) -> None:
        self.reports.put_nowait(applied)


class Server:
    """A follower of announcements, with its engine and its way to weight_sync."""

    def __init__(self) -> None:
        self.engine, self.receiver = FakeEngine(), FakeReceiver()
        self.following: asyncio.Task[None] | None = None

        async def on_applied(policy_version: int) -> None:
            """Nobody asks for it here."""

        self.follower = WeightFollower(
            self.engine,  # type: ignore[arg-type]
            self.receiver,  # type: ignore[arg-type]
            "s0",
            on_applied,
        )

    async def told(self, available: WeightsAvailable) -> WeightsApplied:
        """Announces a version; returns the next report."""
        await self.follower.on_published(available)
        async with asyncio.timeout(60):
            return await self.receiver.reports.get()


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    made = Server()
    made.following = asyncio.create_task(made.follower.follow())
    yield made
    made.following.cancel()
    await asyncio.wait({made.following})


def manifest(policy_version: int, base_version: int | None = None) -> WeightManifest:
    return WeightManifest(policy_version, "a", policy_version, base_version, (), 0)


def adapters(policy_version: int, base_version: int) -> WeightsAvailable:
    base = BaseWeights(manifest(base_version), SOURCE)
    return WeightsAvailable(manifest(policy_version, base_version), SOURCE, base)


async def test_a_base_that_did_not_come_is_fetched_again_and_its_adapters_after_it(
    server: Server,
) -> None:
    server.receiver.errors[0] = WeightsUnreachableError("tcp://nowhere:1", 10.0)
    failed = await server.told(adapters(3, base_version=0))
    assert (failed.policy_version, bool(failed.error)) == (0, True)
    first = await server.told(adapters(3, base_version=0))
    assert (first.policy_version, first.error) == (0, "")
    second = await server.receiver.reports.get()
    assert (second.policy_version, second.error) == (3, "")
    assert server.engine.applied == [0, 3]


async def test_a_base_that_does_not_fit_is_fetched_once(server: Server) -> None:
    server.engine.refused.add(0)
    assert "does not fit" in (await server.told(adapters(3, base_version=0))).error
    await server.follower.on_published(adapters(3, base_version=0))
    later = await server.told(WeightsAvailable(manifest(4), SOURCE))
    assert (later.policy_version, later.error) == (4, "")
    assert server.receiver.fetched == [0, 4]


@pytest.mark.parametrize("error", [MemoryError("no room"), OSError("no room")], ids=repr)
async def test_a_version_without_room_to_fetch_it_is_reported_and_comes_with_the_next_announcement(
    server: Server, error: Exception
) -> None:
    server.receiver.errors[1] = error
    failed = await server.told(WeightsAvailable(manifest(1), SOURCE))
    assert "no room" in failed.error
    assert not failed.damaged
    assert (await server.told(WeightsAvailable(manifest(1), SOURCE))).error == ""
    assert server.engine.applied == [1]


@pytest.mark.parametrize(
    ("error", "end"),
    [
        (EngineRefusalError("its logits differ: take another engine"), ConfigError),
        (EngineFailedError("half of it is copied"), StopService),
    ],
    ids=repr,
)
async def test_a_restart_follows_a_failed_swap_but_no_model_that_cannot_run(
    server: Server, error: Exception, end: type[Exception]
) -> None:
    server.engine.error = error
    await server.follower.on_published(WeightsAvailable(manifest(1), SOURCE))
    assert server.following is not None
    with pytest.raises(end, match=str(error)):
        async with asyncio.timeout(60):
            await server.following


async def test_a_server_that_is_stopped_in_the_middle_of_a_swap_goes_on_with_its_calls() -> None:
    server = Server()
    server.engine.swapped.clear()
    following = asyncio.create_task(server.follower.follow())
    await server.follower.on_published(WeightsAvailable(manifest(0), SOURCE))
    async with asyncio.timeout(60):
        while not server.engine.is_paused:
            await asyncio.sleep(0)
    following.cancel()  # a drain ends all loops first, and then waits for the calls
    await asyncio.wait({following})
    server.engine.swapped.set()
    for _ in range(10):
        await asyncio.sleep(0)
    assert (server.engine.is_paused, server.engine.applied) == (False, [0])
