"""A stranger's tool worker answers what no honest one does: its caller loses that call alone."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import msgspec
import nats.micro
import pytest
from click.testing import Result
from nats.micro.request import Request
from typer.testing import CliRunner

from tailrace.bus import Bus
from tailrace.sdk.tool import as_offer, tool
from tailrace.tools import ToolClient
from tailrace.tools.discovery import SERVICE_NAME, Registration
from tailrace_cli.commands.tools import app
from tailrace_protos.chat import ToolCall
from tests.integration.tools.conftest import Serve
from tests.world.servers import ServerProcess
from tests.world.serving import endpoints_of

DEEP = b'{"a":' * 20_000


@tool
def evil() -> str:
    """Its schema; the worker below answers its calls."""
    return ""


@tool
def honest() -> str:
    """A tool of another worker."""
    return "as always"


def accepted(**fields: Any) -> bytes:
    return msgspec.json.encode({"type": "tool_accepted", "call_id": "c", **fields})


def result(**fields: Any) -> bytes:
    return msgspec.json.encode(
        {"type": "tool_result", "call_id": "c", "name": "evil", "content": "x", **fields}
    )


ANSWERS: dict[str, list[bytes]] = {
    "an id that is a wildcard": [accepted(worker_id="*")],
    "an id that is every subject": [accepted(worker_id=">")],
    "an id with a second command": [accepted(worker_id="w 0\r\n\r\nPUB other.run 0\r\n\r\n")],
    "an id without an end": [accepted(worker_id="w" * 100_000)],
    "an id of empty tokens": [accepted(worker_id="..")],
    "an id that is no text": [accepted(worker_id=["w"])],
    "state under an id that is a wildcard": [accepted(worker_id="*", is_stateful=True)],
    "a result that is deeper than any": [accepted(worker_id="w"), DEEP],
    "a result of another kind": [accepted(worker_id="w"), result(content={"a": 1})],
    "a result in a payload that nobody has": [accepted(), result(content_blob="../../model_card")],
    "an outcome that is none": [accepted(), result(is_error=True, error_kind="colour")],
    "an endless time": [accepted(), result(elapsed_s=float("1e400"))],
}


@pytest.fixture
async def enter(
    nats_server: ServerProcess, run_name: str
) -> AsyncIterator[Callable[[list[bytes]], Any]]:
    """Registers a worker of the tool `evil` that answers every call with these payloads."""
    entered: list[Bus] = []

    async def start(answers: list[bytes]) -> None:
        bus = await Bus.connect(endpoints_of(nats_server.url), name="stranger")
        entered.append(bus)

        async def handle(request: Request) -> None:
            sent_id = msgspec.json.decode(request.data)["call_id"]
            for answer in answers:
                data = answer.replace(b'"call_id":"c"', b'"call_id":"%s"' % sent_id.encode())
                await bus.connection.client.publish(request._msg.reply, data)

        registration = Registration(bus, "stranger", run_name, dict)
        await registration.enter([as_offer(evil).spec], handle)

    yield start
    for bus in entered:
        await bus.close()


@pytest.mark.parametrize("answers", ANSWERS.values(), ids=ANSWERS)
async def test_a_worker_that_answers_anything_costs_its_own_call_alone(
    client: ToolClient, serve: Serve, enter: Callable[[list[bytes]], Any], answers: list[bytes]
) -> None:
    await serve(honest)
    await enter(answers)
    async with asyncio.timeout(60), client.session("e", ["evil", "honest"]) as tools:
        told = await tools.call(ToolCall("c", "evil", "{}"))
        assert told.infra_error or told.is_error
        assert (await tools.call(ToolCall("d", "honest", "{}"))).content == "as always"
    assert [task for task in asyncio.all_tasks() if task.done() and task.exception()] == []


@pytest.mark.parametrize("schema", ["{", '"text"', '{"a":' * 20_000])
async def test_a_worker_without_a_valid_schema_hides_no_other_one_from_the_list(
    nats_server: ServerProcess, serve: Serve, bus: Bus, schema: str
) -> None:
    await serve(honest)
    stranger = await Bus.connect(endpoints_of(nats_server.url), name="stranger")
    micro = await nats.micro.add_service(stranger.connection.client, name=SERVICE_NAME, version="1.0.0")

    async def handle(_request: Request) -> None: ...

    subject = f"{bus.run}.tool.evil"
    metadata = {"tool": "evil", "schema": schema}
    await micro.add_endpoint(name="evil", subject=subject, handler=handle, metadata=metadata)

    def list_tools() -> Result:
        return CliRunner().invoke(app, ["ls", "--nats", nats_server.url], catch_exceptions=False)

    try:
        async with asyncio.timeout(60):
            while True:  # a busy worker may answer too late for one list
                listed = await asyncio.to_thread(list_tools)
                if f"({bus.run}.tool.honest)" in listed.stdout and subject in listed.stderr:
                    break
    finally:
        await stranger.close()
    assert f"{subject}: a worker serves it without a valid schema" in listed.stderr
