"""Time, size, repetition and cancellation of calls."""

from __future__ import annotations

import asyncio
import sys
import threading
from typing import Any, ClassVar

import pytest
from nats.aio.msg import Msg
from nats.micro.request import Request

from tailrace.bus import Bus
from tailrace.sdk.tool import Tool, ToolOffer, ToolOutput, ToolUnavailableError, tool
from tailrace.store import StoreConnection
from tailrace.tools import ToolClient, ToolErrorKind
from tailrace_protos import subjects
from tailrace_protos.base import (
    JSON_CONTENT_TYPE,
    MSGPACK_CONTENT_TYPE,
    decode,
    decode_json,
    encode,
    encode_json,
)
from tailrace_protos.chat import ToolCall
from tailrace_protos.tool import (
    CallReply,
    CallTool,
    CancelTools,
    ProbeTools,
    ToolAccepted,
    ToolResult,
    ToolsProbed,
)
from tests.integration.tools.conftest import SHORT_DEADLINES, Serve
from tests.world.samples import sample
from tests.world.serving import eventually

MB = 1 << 20


def call(name: str, arguments: str = "{}") -> ToolCall:
    return ToolCall("c", name, arguments)


@tool
def flood(num_bytes: int) -> str:
    """So many bytes."""
    return "x" * num_bytes


@tool
def length(text: str) -> int:
    """How long a text is."""
    return len(text)


async def test_a_tool_that_never_answers_times_out_and_the_model_is_told(
    client: ToolClient, serve: Serve
) -> None:
    cancelled = asyncio.Event()

    @tool(timeout_s=0.2)
    async def endless() -> str:
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()
        return ""

    worker = await serve(endless)
    async with client.session("e", ["endless"]) as tools:
        result = await tools.call(call("endless"))
    assert result.error_kind is ToolErrorKind.TIMEOUT
    assert result.content == "endless did not answer within 0.2 s"
    assert cancelled.is_set()
    assert worker.host.num_abandoned == 0


async def test_a_caller_may_give_less_time_than_the_tool_has(client: ToolClient, serve: Serve) -> None:
    @tool
    async def slow() -> str:
        await asyncio.Event().wait()
        return ""

    await serve(slow)
    async with client.session("e", ["slow"]) as tools:
        result = await tools.call(call("slow"), timeout_s=0.1)
    assert result.content == "slow did not answer within 0.1 s"


class Held(Tool):
    """Ends when it is let go."""

    name = "held"
    description = "Wait."
    parameters: ClassVar[dict[str, Any]] = {"type": "object", "properties": {}}
    is_stateful = False

    def __init__(self, gate: asyncio.Event, begun: asyncio.Event) -> None:
        self.gate = gate
        self.begun = begun

    async def execute(self, arguments: dict[str, Any]) -> str:
        self.begun.set()
        await self.gate.wait()
        return "over"


async def test_the_wait_for_room_that_tools_share_takes_no_time_of_a_call(
    client: ToolClient, serve: Serve
) -> None:
    room, gate, begun, other = asyncio.Semaphore(1), asyncio.Event(), asyncio.Event(), asyncio.Event()
    first = ToolOffer.of(Held, lambda: Held(gate, begun), room=room)
    second = ToolOffer.of(Held, lambda: Held(gate, other), room=room, name="brief", timeout_s=0.2)
    await serve(first, second)
    async with client.session("e", ["held", "brief"]) as tools:
        holding = asyncio.create_task(tools.call(call("held")))
        await begun.wait()
        waiting = asyncio.create_task(tools.call(call("brief")))
        await asyncio.wait({waiting}, timeout=1.0)
        assert not other.is_set()
        gate.set()
        assert [(await each).content for each in (holding, waiting)] == ["over", "over"]


async def test_a_function_that_blocks_for_ever_is_abandoned_and_counted(
    client: ToolClient, serve: Serve
) -> None:
    released = threading.Event()

    @tool
    def blocked() -> str:
        released.wait()
        return ""

    worker = await serve(blocked, max_concurrency=1, max_waiting=0)
    async with client.session("e", ["blocked"]) as tools:
        result = await tools.call(call("blocked"), timeout_s=0.1)
        assert result.error_kind is ToolErrorKind.TIMEOUT
        assert worker.host.num_abandoned == 1
        second = asyncio.create_task(tools.call(call("blocked")))
        await eventually(lambda: sample("tailrace_tool_refused_calls_total", tool="blocked") > 0)
        released.set()
        assert (await second).content == ""
    await eventually(lambda: worker.host.num_abandoned == 0)


async def test_a_cancelled_call_is_cancelled_at_the_worker(client: ToolClient, serve: Serve) -> None:
    begun, cancelled = asyncio.Event(), asyncio.Event()

    @tool
    async def endless() -> str:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()
        return ""

    worker = await serve(endless)
    async with client.session("e", ["endless"]) as tools:
        calling = asyncio.create_task(tools.call(call("endless")))
        await begun.wait()
        calling.cancel()
        with pytest.raises(asyncio.CancelledError):
            await calling
        await asyncio.wait_for(cancelled.wait(), 60)
    await eventually(lambda: not worker._calls.running)
    assert client._port._receivers == {}


async def test_errors_of_the_tool_are_for_the_model_and_those_of_the_world_are_not(
    client: ToolClient, serve: Serve
) -> None:
    @tool
    def fail(how: str) -> object:
        """Fail in some way."""
        if how == "exit":
            sys.exit("bye")
        if how == "report":
            return ToolOutput("nothing found", is_error=True)
        if how == "world":
            raise ToolUnavailableError("the database is down")
        if how == "strange":
            return {1, object()}
        if how == "surrogate":
            return "half \ud800"
        raise ZeroDivisionError(how)

    await serve(fail)
    async with client.session("e", ["fail"]) as tools:
        outcomes = {
            how: await tools.call(call("fail", f'{{"how": "{how}"}}'))
            for how in ("exit", "report", "world", "strange", "surrogate", "divide")
        }
    exited = "fail raised ExitError: it ended its process (SystemExit('bye'))"
    assert outcomes["exit"].content.startswith(exited)
    assert outcomes["report"].error_kind is ToolErrorKind.REPORTED
    assert outcomes["report"].content == "nothing found"
    assert outcomes["world"].infra_error == "fail is not available: the database is down"
    assert not outcomes["world"].is_error
    assert "cannot be sent" in outcomes["strange"].content
    assert outcomes["surrogate"].content == "half ?"
    assert outcomes["divide"].content == "fail raised ZeroDivisionError: divide"
    assert outcomes["divide"].error_kind is ToolErrorKind.RAISED


class Unusual(BaseException):
    """As test frameworks and libraries of tasks raise it."""


@pytest.mark.parametrize("is_async", [True, False])
async def test_whatever_a_tool_raises_is_answered_at_once(
    client: ToolClient, serve: Serve, is_async: bool
) -> None:
    def fail(how: str) -> str:
        """Raise something."""
        raise {
            "unusual": Unusual("half \ud800"),
            "cancelled": asyncio.CancelledError("by a library"),
            "exit": SystemExit("bye"),
        }[how]

    async def fail_later(how: str) -> str:
        """Raise something."""
        await asyncio.sleep(0)
        return fail(how)

    name = "fail_later" if is_async else "fail"
    await serve(tool(fail_later if is_async else fail))
    async with client.session("e", [name]) as tools:
        for how in ("unusual", "cancelled", "exit"):
            result = await tools.call(call(name, f'{{"how": "{how}"}}'))
            assert result.error_kind is ToolErrorKind.RAISED, result
            kind = "ExitError" if how == "exit" else "RuntimeError"
            assert result.content.startswith(f"{name} raised {kind}: ")


async def test_a_tool_that_the_row_does_not_name_is_refused_with_those_it_names(
    client: ToolClient, serve: Serve
) -> None:
    await serve(flood, length)
    async with client.session("e", ["flood"]) as tools:
        result = await tools.call(call("length", '{"text": ""}'))
    assert result.error_kind is ToolErrorKind.UNKNOWN_TOOL
    assert result.content == "there is no tool 'length'; tools: flood"


async def test_ten_megabytes_of_output_come_by_claim_check(
    bus: Bus, serve: Serve, redis: StoreConnection
) -> None:
    await serve(flood, redis=redis)
    client = ToolClient(bus, bus.run, redis=redis, deadlines=SHORT_DEADLINES)
    async with client.session("e", ["flood"]) as tools:
        result = await tools.call(call("flood", f'{{"num_bytes": {10 * MB}}}'))
        too_much = await tools.call(call("flood", f'{{"num_bytes": {17 * MB}}}'))
    await client.close()
    assert result.infra_error == ""
    assert result.content == "x" * 10 * MB
    assert too_much.error_kind is ToolErrorKind.TOO_LARGE
    assert too_much.content == (
        f"the result of flood has {17 * MB} bytes, at most {16 * MB} can be returned: ask for less"
    )


async def test_ten_megabytes_of_output_without_redis_are_a_typed_error(
    client: ToolClient, serve: Serve
) -> None:
    await serve(flood)
    async with client.session("e", ["flood"]) as tools:
        result = await tools.call(call("flood", f'{{"num_bytes": {10 * MB}}}'))
        after = await tools.call(call("flood", '{"num_bytes": 3}'))
    assert result.error_kind is ToolErrorKind.TOO_LARGE
    assert "by a worker that has no Redis" in result.content
    assert after.content == "xxx"


async def test_big_arguments_come_by_claim_check_or_are_a_typed_error(
    bus: Bus, client: ToolClient, serve: Serve, redis: StoreConnection
) -> None:
    await serve(length, redis=redis)
    big = call("length", f'{{"text": "{"y" * 3 * MB}"}}')
    rich = ToolClient(bus, bus.run, redis=redis, deadlines=SHORT_DEADLINES)
    async with rich.session("e", ["length"]) as tools:
        assert (await tools.call(big)).content == str(3 * MB)
    await rich.close()
    async with client.session("e", ["length"]) as tools:
        result = await tools.call(big)
    assert result.error_kind is ToolErrorKind.TOO_LARGE
    assert "the arguments have" in result.content


@pytest.mark.parametrize("content_type", [JSON_CONTENT_TYPE, MSGPACK_CONTENT_TYPE, ""])
async def test_any_caller_may_speak_json_or_msgpack(
    bus: Bus, serve: Serve, run_name: str, content_type: str
) -> None:
    await serve(length)
    is_json = content_type == JSON_CONTENT_TYPE
    request = CallTool("raw-1", "length", {"text": "four"})
    replies = await _raw_replies(bus, subjects.tool("length", run_name), request, content_type)
    decoder = decode_json if is_json else decode
    accepted, result = (decoder(data, CallReply) for data in replies)
    assert isinstance(accepted, ToolAccepted)
    assert isinstance(result, ToolResult)
    assert result.content == "4"


async def _raw_replies(bus: Bus, subject: str, request: CallTool, content_type: str) -> list[bytes]:
    """Acceptance and result of a call by a bare NATS client."""
    nats = bus.connection.client
    inbox = nats.new_inbox()
    subscription = await nats.subscribe(inbox)
    data = encode_json(request) if content_type == JSON_CONTENT_TYPE else encode(request)
    headers = {"Content-Type": content_type} if content_type else None
    await nats.publish(subject, data, reply=inbox, headers=headers)
    return [(await subscription.next_msg(timeout=60)).data for _ in range(2)]


async def test_a_call_that_comes_again_runs_once_and_is_answered_every_time(
    bus: Bus, serve: Serve, run_name: str
) -> None:
    num_runs = 0
    opened = asyncio.Event()

    @tool
    async def once() -> int:
        nonlocal num_runs
        num_runs += 1
        await opened.wait()
        return num_runs

    worker = await serve(once)
    subject = subjects.tool("once", run_name)
    request = CallTool("same-id", "once")
    pairs = [asyncio.create_task(_raw_replies(bus, subject, request, "")) for _ in range(3)]
    await eventually(lambda: any(len(c.replies) == 3 for c in worker._calls.running.values()))
    opened.set()
    answers = [decode((await pair)[1], CallReply) for pair in pairs]
    nats = bus.connection.client
    late = await nats.request(subjects.tool_worker(worker.worker_id), encode(request), timeout=60)
    answers.append(decode(late.data, CallReply))
    assert [answer.content for answer in answers if isinstance(answer, ToolResult)] == ["1"] * 4
    assert num_runs == 1


async def test_a_call_that_is_cancelled_as_it_comes_leaves_nothing_behind(
    bus: Bus, serve: Serve
) -> None:
    worker = await serve(length, max_concurrency=1)
    own = subjects.tool_worker(worker.worker_id)

    def message(content: object) -> Request:
        return Request(Msg(_client=bus.connection.client, subject=own, reply="r", data=encode(content)))

    await worker._on_request(message(CallTool("hasty", "length", {"text": "four"})))
    (running,) = worker._calls.running.values()
    await worker._on_request(message(CancelTools(("hasty",))))  # one packet brought both
    assert running.task is not None
    await asyncio.wait({running.task})
    assert not worker._calls.running


async def test_a_result_that_was_lost_on_its_way_is_asked_for_again(
    client: ToolClient, serve: Serve
) -> None:
    opened = asyncio.Event()

    @tool
    async def quiet() -> str:
        await opened.wait()
        return "heard at last"

    worker = await serve(quiet)
    async with client.session("e", ["quiet"]) as tools:
        calling = asyncio.create_task(tools.call(call("quiet")))
        await eventually(lambda: worker.host.num_running == 1)
        (running,) = worker._calls.running.values()
        running.replies.clear()  # whatever is answered now reaches nobody
        opened.set()
        assert (await asyncio.wait_for(calling, 60)).content == "heard at last"


async def test_malformed_requests_and_unknown_tools_are_answered_400(
    bus: Bus, serve: Serve, run_name: str
) -> None:
    worker = await serve(length)
    nats = bus.connection.client
    broken = await nats.request(subjects.tool("length", run_name), b"\xc1", timeout=60)
    assert (broken.headers or {})["Nats-Service-Error-Code"] == "400"
    assert "malformed" in (broken.headers or {})["Nats-Service-Error"]
    own = subjects.tool_worker(worker.worker_id)
    unknown = await nats.request(own, encode(CallTool("c", "other")), timeout=60)
    assert (unknown.headers or {})["Nats-Service-Error"] == "no tool 'other' here"
    probed = await nats.request(own, encode(ProbeTools(("x",), ("y",))), timeout=60)
    assert decode(probed.data, ToolsProbed) == ToolsProbed()
