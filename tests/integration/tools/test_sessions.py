"""Stateful tools: one object per episode, at one worker, released once whatever happens."""

from __future__ import annotations

import asyncio
import re
from typing import Any, ClassVar

import pytest

from tailrace.bus import Bus
from tailrace.sdk.tool import Tool, ToolOffer, ToolSession
from tailrace.tools import ToolClient
from tailrace_protos.chat import ToolCall
from tests.integration.tools.conftest import SHORT_DEADLINES, Serve
from tests.world.samples import sample
from tests.world.servers import ServerProcess
from tests.world.serving import endpoints_of, eventually


class Counter(Tool):
    """Counts its calls; `where` is the worker, `log` what happened to all its objects."""

    name = "counter"
    description = "Count."
    parameters: ClassVar[dict[str, Any]] = {
        "type": "object",
        "properties": {"by": {"type": "integer"}},
        "required": ["by"],
    }

    def __init__(self, where: str, log: list[str]) -> None:
        self.where = where
        self.log = log
        self.count = 0
        self.episode_id = ""

    async def create(self, session: ToolSession) -> None:
        self.episode_id = session.episode_id
        self.count = session.create_kwargs.get("start", 0)
        if self.count < 0:
            raise ValueError("cannot start below 0")
        self.log.append(f"create {self.episode_id}")

    async def execute(self, arguments: dict[str, Any]) -> str:
        if arguments["by"] == 0:
            await asyncio.Event().wait()
        before = self.count
        await asyncio.sleep(0.001)  # two at once would lose one
        self.count = before + arguments["by"]
        return f"{self.where}:{self.count}"

    async def release(self) -> None:
        self.log.append(f"release {self.episode_id}")


def add(by: int, number: int = 0) -> ToolCall:
    return ToolCall(f"c{number}", "counter", f'{{"by": {by}}}')


def counters(where: str, log: list[str]) -> ToolOffer:
    return ToolOffer.of(Counter, lambda: Counter(where, log))


async def test_an_episode_s_calls_go_to_one_object_at_one_worker(
    client: ToolClient, serve: Serve
) -> None:
    log: list[str] = []
    for name in ("w1", "w2", "w3"):
        await serve(counters(name, log))
    homes = set()
    for episode in range(12):
        kwargs = {"counter": {"start": episode * 100}}
        async with client.session(f"e{episode}", ["counter"], create_kwargs=kwargs) as tools:
            results = await asyncio.gather(*(tools.call(add(1, n)) for n in range(8)))
            answers = [result.content.split(":") for result in results]
            assert len({where for where, _ in answers}) == 1
            assert [int(count) for _, count in answers] == [episode * 100 + n + 1 for n in range(8)]
            homes.add(answers[0][0])
    assert len(homes) > 1
    assert sorted(log) == sorted(f"{what} e{n}" for n in range(12) for what in ("create", "release"))


async def test_release_comes_once_when_the_episode_fails(client: ToolClient, serve: Serve) -> None:
    log: list[str] = []
    await serve(counters("w", log))

    async def episode() -> None:
        async with client.session("e", ["counter"]) as tools:
            await tools.call(add(1))
            raise RuntimeError("the agent broke")

    with pytest.raises(RuntimeError, match="the agent broke"):
        await episode()
    assert log == ["create e", "release e"]


async def test_release_comes_when_the_episode_is_cancelled_in_a_call(
    client: ToolClient, serve: Serve
) -> None:
    log: list[str] = []
    worker = await serve(counters("w", log))

    async def episode() -> None:
        async with client.session("e", ["counter"]) as tools:
            await tools.call(add(0))

    playing = asyncio.create_task(episode())
    await eventually(lambda: worker.host.num_running == 1)
    playing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await playing
    await eventually(lambda: log == ["create e", "release e"])
    assert worker.host.num_running == 0


async def test_an_episode_that_called_nothing_costs_the_workers_nothing(
    client: ToolClient, serve: Serve
) -> None:
    log: list[str] = []
    await serve(counters("w", log))
    async with client.session("e", ["counter"]) as tools:
        assert [schema.name for schema in await tools.schemas()] == ["counter"]
    assert log == []


async def test_objects_whose_caller_vanished_are_released_after_their_lease(
    nats_server: ServerProcess, serve: Serve, run_name: str
) -> None:
    log: list[str] = []
    worker = await serve(counters("w", log))
    bus = await Bus.connect(endpoints_of(nats_server.url), name="caller", run=run_name)
    client = ToolClient(bus, run_name, deadlines=SHORT_DEADLINES)
    tools = client.session("e", ["counter"])
    await tools.call(add(1))
    calling = asyncio.create_task(tools.call(add(0)))
    await eventually(lambda: any(client._watch._attempts.values()))  # it heard that the call runs
    await client._watch.close()  # as a process that died: no probe, no release
    await eventually(lambda: "release e" in log)
    await eventually(lambda: worker.host.num_running == 0)
    assert log == ["create e", "release e"]
    calling.cancel()
    await bus.close()


async def test_a_long_episode_keeps_its_object_without_calling_it(
    client: ToolClient, serve: Serve
) -> None:
    log: list[str] = []
    worker = await serve(counters("w", log))
    async with client.session("e", ["counter"]) as tools:
        await tools.call(add(1))
        heard = worker._calls.session_leases._heard_s
        first = dict(heard)
        lease_s = SHORT_DEADLINES.lease_s
        await eventually(lambda: any(heard[key] > first[key] + 1.5 * lease_s for key in first))
        assert (await tools.call(add(1))).content == "w:2"


async def test_a_session_whose_worker_died_is_an_infrastructure_failure(
    client: ToolClient, serve: Serve
) -> None:
    log: list[str] = []
    first = await serve(counters("w1", log))
    async with client.session("e", ["counter"]) as tools:
        assert (await tools.call(add(1))).content == "w1:1"
        await serve(counters("w2", log))
        await first.close()
        result = await tools.call(add(1))
    assert result.content == ""
    # NATS may know of the worker's end before the probes do, or after them.
    assert re.search("no worker listens|which had the session, died", result.infra_error)
    assert log == ["create e", "release e"]


async def test_an_object_that_cannot_be_made_is_an_infrastructure_failure(
    client: ToolClient, serve: Serve
) -> None:
    log: list[str] = []
    await serve(counters("w", log))
    async with client.session("e", ["counter"], create_kwargs={"counter": {"start": -1}}) as tools:
        result = await tools.call(add(1))
    assert "counter.create failed" in result.infra_error
    assert "cannot start below 0" in result.infra_error


async def test_wrong_arguments_in_the_first_call_do_not_spoil_the_session(
    client: ToolClient, serve: Serve
) -> None:
    log: list[str] = []
    await serve(counters("w", log))
    async with client.session("e", ["counter"]) as tools:
        wrong = await tools.call(ToolCall("c", "counter", '{"by": "one"}'))
        right = await tools.call(add(1))
    assert wrong.is_error
    assert "'one' is not of type 'integer' - at `by`" in wrong.content
    assert right.content == "w:1"
    assert log == ["create e", "release e"]


async def test_a_draining_worker_keeps_its_sessions_until_they_end(
    client: ToolClient, serve: Serve
) -> None:
    log: list[str] = []
    worker = await serve(counters("w", log))
    async with client.session("e", ["counter"]) as tools:
        await tools.call(add(1))
        draining = asyncio.create_task(worker.drain(20.0))
        await eventually(lambda: worker._is_draining)
        assert (await tools.call(add(1))).content == "w:2"
    await draining
    assert log == ["create e", "release e"]


async def test_a_session_too_many_waits_at_its_caller_until_another_ends(
    client: ToolClient, serve: Serve
) -> None:
    log: list[str] = []
    await serve(counters("w", log), max_sessions=1)
    refused = sample("tailrace_tool_refused_calls_total", tool="counter")
    async with client.session("second", ["counter"]) as second:
        async with client.session("first", ["counter"]) as first:
            assert (await first.call(add(1))).content == "w:1"
            waiting = asyncio.create_task(second.call(add(1)))
            await eventually(
                lambda: sample("tailrace_tool_refused_calls_total", tool="counter") > refused
            )
            assert (await first.call(add(1, 1))).content == "w:2"
            assert not waiting.done()
        assert (await waiting).content == "w:1"
    assert log == ["create first", "release first", "create second", "release second"]


async def test_a_worker_that_comes_back_after_it_was_found_lost_has_new_sessions(
    client: ToolClient, serve: Serve
) -> None:
    log: list[str] = []
    worker = await serve(counters("w", log))
    client._watch._declare_lost(worker.worker_id, "it was away")
    async with client.session("lost", ["counter"]) as tools:
        assert [(await tools.call(add(1))).content for _ in range(2)] == ["w:1", "w:2"]
        client._watch._declare_lost(worker.worker_id, "it was away again")
        assert "which had the session, died" in (await tools.call(add(1))).infra_error
    async with client.session("new", ["counter"]) as tools:
        assert [(await tools.call(add(1))).content for _ in range(2)] == ["w:1", "w:2"]


async def test_a_worker_that_ends_while_nats_is_away_releases_its_objects(
    client: ToolClient, serve: Serve, nats_server: ServerProcess
) -> None:
    log: list[str] = []
    worker = await serve(counters("w", log))
    tools = client.session("e", ["counter"])
    calling = asyncio.create_task(tools.call(add(0)))
    await eventually(lambda: worker.host.num_running == 1)
    nats_server.kill()
    try:
        await eventually(lambda: not worker._bus.connection.is_connected)
        await asyncio.wait_for(worker.close(), 60)
    finally:
        nats_server.start()
        calling.cancel()
    assert log == ["create e", "release e"]
