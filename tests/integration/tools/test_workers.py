"""Workers that come, go, die, are full or shut down."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from nats.aio.msg import Msg

from tailrace.bus import Bus, CallFailedError, flush
from tailrace.bus.calls import error_headers
from tailrace.sdk.tool import AnyTool, tool
from tailrace.tools import ToolClient
from tailrace.tools.client import MAX_DELIVERIES
from tailrace.tools.discovery import schema_hash
from tailrace.tools.episode_tools import SchemaMismatchError
from tailrace.tools.wire import JSON
from tailrace_protos import subjects
from tailrace_protos.chat import ToolCall
from tailrace_protos.generation import CallErrorCode
from tailrace_protos.tool import CallTool, ToolAccepted, ToolsProbed
from tests.integration.tools.conftest import SHORT_DEADLINES, Serve
from tests.world.samples import sample
from tests.world.servers import ServerProcess
from tests.world.serving import eventually

PROCESS = Path(__file__).with_name("worker_process.py")


def call(name: str, number: int = 0) -> ToolCall:
    return ToolCall(f"c{number}", name, "{}")


@contextmanager
def worker_process(nats_url: str, run: str) -> Iterator[subprocess.Popen[str]]:
    """A worker in a process of its own that prints a line for every call it begins."""
    process = subprocess.Popen(
        [sys.executable, str(PROCESS), nats_url, run],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )
    try:
        assert read_line(process) == "ready"
        yield process
    finally:
        process.kill()
        process.wait()


def read_line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


async def line_of(process: subprocess.Popen[str]) -> str:
    return await asyncio.wait_for(asyncio.to_thread(read_line, process), 60)


def knows_its_worker(client: ToolClient) -> bool:
    """Whether the acceptance of a call has come; what dies before may keep it back."""
    return any(client._watch._attempts.values())


async def test_workers_share_calls_and_may_join_and_leave_at_any_time(
    client: ToolClient, serve: Serve
) -> None:
    async def who(name: str) -> str:
        return name

    def named(name: str) -> object:
        async def answer() -> str:
            return name

        return tool(name="who")(answer)

    first = await serve(named("first"))
    async with client.session("e", ["who"]) as tools:
        answers = [(await tools.call(call("who", n))).content for n in range(5)]
        assert set(answers) == {"first"}
        await serve(named("second"))
        answers = [(await tools.call(call("who", n))).content for n in range(60)]
        assert set(answers) == {"first", "second"}
        await first.drain()
        answers = [(await tools.call(call("who", n))).content for n in range(20)]
        assert set(answers) == {"second"}


async def test_a_run_s_own_worker_wins_over_one_for_everybody(
    client: ToolClient, serve: Serve, run_name: str
) -> None:
    name = f"whose_{run_name}"

    def named(text: str) -> object:
        async def answer() -> str:
            return text

        return tool(name=name)(answer)

    await serve(named("everybody's"), run="")
    async with client.session("e1", [name]) as tools:
        assert (await tools.call(call(name))).content == "everybody's"
    own = await serve(named("own"))
    other = ToolClient(client._port.bus, client.run, deadlines=SHORT_DEADLINES)
    async with other.session("e2", [name]) as tools:
        assert {(await tools.call(call(name, n))).content for n in range(20)} == {"own"}
        await own.drain()
        assert (await tools.call(call(name))).content == "everybody's"
    await other.close()


async def test_a_pinned_tool_waits_until_no_worker_serves_another_schema(
    client: ToolClient, serve: Serve
) -> None:
    def described(text: str) -> AnyTool:
        async def answer() -> str:
            return text

        return tool(name="pinned", description=text)(answer)

    new, old = await serve(described("new")), await serve(described("old"))
    (pin,), (other,) = ([schema_hash(spec.schema) for spec in one.host.specs] for one in (new, old))
    strict = ToolClient(client._port.bus, client.run, deadlines=SHORT_DEADLINES, pins={"pinned": pin})
    with pytest.raises(
        SchemaMismatchError, match=f"'pinned' is pinned to schema {pin}.*{other}"
    ) as told:
        await strict.schemas(["pinned"])
    assert "tailrace tools ls" in str(told.value)
    await old.drain()
    (schema,) = await strict.schemas(["pinned"])
    assert schema.description == "new"
    await strict.close()


async def test_an_answer_that_is_no_message_ends_even_a_call_that_may_be_repeated(
    client: ToolClient, bus: Bus
) -> None:
    async def answer(message: Msg) -> None:
        call_id = JSON.decode(message.data, CallTool).call_id
        accepted = JSON.encode(ToolAccepted(call_id, is_idempotent=True))
        for data in (accepted, b'{"type":"tool_result","elapsed_s":Infinity}'):
            await bus.connection.publish(message.reply, data, headers=JSON.headers)

    await bus.connection.subscribe(subjects.tool("confused", client.run), answer)
    await flush(bus.connection.client)
    async with client.session("e", ["confused"]) as tools, asyncio.timeout(60):
        result = await tools.call(call("confused"))
    assert "sent a malformed answer" in result.infra_error


async def test_a_call_that_worker_after_worker_forgets_ends(
    client: ToolClient, bus: Bus, run_name: str
) -> None:
    deliveries: list[str] = []
    worker_id = f"forgetful_{run_name}"

    async def accept(message: Msg) -> None:
        call_id = JSON.decode(message.data, CallTool).call_id
        deliveries.append(call_id)
        accepted = ToolAccepted(call_id, worker_id, is_idempotent=True)
        await bus.connection.publish(message.reply, JSON.encode(accepted), headers=JSON.headers)

    async def know_nothing(message: Msg) -> None:
        if message.reply:
            await bus.connection.publish(
                message.reply, JSON.encode(ToolsProbed()), headers=JSON.headers
            )

    await bus.connection.subscribe(subjects.tool("forgotten", client.run), accept)
    await bus.connection.subscribe(subjects.tool_worker(worker_id), know_nothing)
    await flush(bus.connection.client)
    async with client.session("e", ["forgotten"]) as tools, asyncio.timeout(60):
        result = await tools.call(call("forgotten"))
    assert result.infra_error.startswith(f"forgotten: {MAX_DELIVERIES} workers lost it; at last: ")
    assert "does not know the call" in result.infra_error
    assert len(deliveries) == MAX_DELIVERIES


async def test_a_worker_that_refuses_a_call_after_all_is_an_infrastructure_failure(
    client: ToolClient, bus: Bus
) -> None:
    async def answer(message: Msg) -> None:
        accepted = ToolAccepted(JSON.decode(message.data, CallTool).call_id)
        refusal = error_headers(CallFailedError(CallErrorCode.OVERLOADED, "no room"))
        await bus.connection.publish(message.reply, JSON.encode(accepted), headers=JSON.headers)
        await bus.connection.publish(message.reply, b"", headers=refusal)

    await bus.connection.subscribe(subjects.tool("fickle", client.run), answer)
    await flush(bus.connection.client)
    async with client.session("e", ["fickle"]) as tools, asyncio.timeout(60):
        result = await tools.call(call("fickle"))
    assert "accepted the call, and then refused it" in result.infra_error
    assert "no room" in result.infra_error


async def test_a_worker_killed_in_a_call_is_an_infrastructure_failure_within_seconds(
    client: ToolClient, nats_server: ServerProcess, run_name: str
) -> None:
    with worker_process(nats_server.url, run_name) as process:
        async with client.session("e", ["stuck"]) as tools:
            calling = asyncio.create_task(tools.call(call("stuck")))
            assert await line_of(process) == "stuck"
            await eventually(lambda: knows_its_worker(client))
            process.send_signal(signal.SIGKILL)
            result = await asyncio.wait_for(calling, 60)
    assert not result.is_error
    assert "died" in result.infra_error


async def test_an_idempotent_call_is_delivered_again_when_its_worker_is_killed(
    client: ToolClient, nats_server: ServerProcess, run_name: str
) -> None:
    with (
        worker_process(nats_server.url, run_name) as one,
        worker_process(nats_server.url, run_name) as two,
    ):
        async with client.session("e", ["repeatable"]) as tools:
            calling = asyncio.create_task(tools.call(call("repeatable")))
            lines = {asyncio.create_task(line_of(process)): process for process in (one, two)}
            begun, waiting = await asyncio.wait(lines, return_when=asyncio.FIRST_COMPLETED)
            victim = lines[begun.pop()]
            await eventually(lambda: knows_its_worker(client))
            victim.send_signal(signal.SIGKILL)
            assert await waiting.pop() == "repeatable"
            survivor = two if victim is one else one
            assert (await asyncio.wait_for(calling, 60)).content == f"by {survivor.pid}"
    assert sample("tailrace_tool_redeliveries_total", tool="repeatable") >= 1


async def test_a_tool_that_nobody_serves_is_an_infrastructure_failure(client: ToolClient) -> None:
    async with client.session("e", ["nowhere"]) as tools:
        result = await tools.call(call("nowhere"))
    assert "no worker listens" in result.infra_error


async def test_a_call_waits_for_a_worker_that_is_only_starting(
    client: ToolClient, serve: Serve
) -> None:
    @tool
    def late() -> str:
        return "here"

    async with client.session("e", ["late"]) as tools:
        calling = asyncio.create_task(tools.call(call("late")))
        await serve(late)
        assert (await calling).content == "here"


async def test_a_full_worker_refuses_with_advice_and_callers_wait_their_turn(
    client: ToolClient, serve: Serve, bus: Bus, run_name: str
) -> None:
    opened = asyncio.Event()
    most = 0
    running = 0

    @tool
    async def gate() -> str:
        nonlocal most, running
        running += 1
        most = max(most, running)
        await opened.wait()
        running -= 1
        return "through"

    await serve(gate, max_concurrency=2, max_waiting=1)
    async with client.session("e", ["gate"]) as tools:
        calls = [asyncio.create_task(tools.call(call("gate", n))) for n in range(8)]
        await eventually(lambda: running == 2)
        await eventually(lambda: sample("tailrace_tool_refused_calls_total", tool="gate") > 0)
        raw = await bus.connection.client.request(
            subjects.tool("gate", run_name),
            msgspec.json.encode({"type": "call_tool", "call_id": "raw", "name": "gate"}),
            headers={"Content-Type": "application/json"},
            timeout=60,
        )
        assert (raw.headers or {})["Nats-Service-Error-Code"] == "503"
        assert float((raw.headers or {})["Retry-After"]) > 0
        opened.set()
        results = await asyncio.gather(*calls)
    assert [result.content for result in results] == ["through"] * 8
    assert most == 2


async def test_a_drain_waits_for_answers_that_are_under_way(
    client: ToolClient, serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    @tool
    async def quick() -> str:
        return "done"

    worker = await serve(quick)
    began, may_end = asyncio.Event(), asyncio.Event()
    answer, drain_tools = worker._replies.result, worker._registration.drain_tools

    async def slow(*args: Any) -> None:
        """Puts a large result into Redis."""
        began.set()
        await may_end.wait()
        await answer(*args)

    async def drained() -> None:
        await drain_tools()
        asyncio.get_running_loop().call_soon(may_end.set)

    monkeypatch.setattr(worker._replies, "result", slow)
    monkeypatch.setattr(worker._registration, "drain_tools", drained)
    async with client.session("e", ["quick"]) as tools:
        calling = asyncio.create_task(tools.call(call("quick")))
        await began.wait()
        await worker.drain(60.0)
        assert (await calling).content == "done"


async def test_a_draining_worker_finishes_its_calls_and_takes_no_others(
    client: ToolClient, serve: Serve
) -> None:
    opened = asyncio.Event()
    begun = asyncio.Event()

    @tool
    async def slow() -> str:
        begun.set()
        await opened.wait()
        return "done"

    worker = await serve(slow)
    async with client.session("e", ["slow"]) as tools:
        first = asyncio.create_task(tools.call(call("slow", 1)))
        await begun.wait()
        draining = asyncio.create_task(worker.drain(20.0))
        await eventually(lambda: worker._is_draining)
        second = await tools.call(call("slow", 2))
        assert "no worker" in second.infra_error
        opened.set()
        assert (await first).content == "done"
        await draining


async def test_a_worker_that_must_end_tells_its_callers(client: ToolClient, serve: Serve) -> None:
    begun = asyncio.Event()

    @tool
    async def endless() -> str:
        begun.set()
        await asyncio.Event().wait()
        return ""

    worker = await serve(endless)
    async with client.session("e", ["endless"]) as tools:
        calling = asyncio.create_task(tools.call(call("endless")))
        await begun.wait()
        await worker.close()
        assert "shut down" in (await calling).infra_error


async def test_a_connection_that_breaks_and_comes_back_costs_no_call(
    client: ToolClient, serve: Serve, nats_server: ServerProcess
) -> None:
    begun, opened = asyncio.Event(), asyncio.Event()

    @tool
    async def patient() -> str:
        begun.set()
        await opened.wait()
        return "still here"

    await serve(patient)
    async with client.session("e", ["patient"]) as tools:
        calling = asyncio.create_task(tools.call(call("patient")))
        await begun.wait()
        await eventually(lambda: knows_its_worker(client))
        connection = client._port.bus.connection
        nats_server.kill()
        await eventually(lambda: not connection.is_connected)
        nats_server.start()
        await eventually(lambda: connection.is_connected, 20.0)
        opened.set()
        result = await asyncio.wait_for(calling, 60)
    assert (result.content, result.infra_error) == ("still here", "")
