"""Calls of a workflow that a relay passes on to an endpoint."""

from __future__ import annotations

import io
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from tailrace_cli.console import plain_console
from tailrace_cli.terminal.relay import Relay
from tailrace_cli.terminal.screen import Screen
from tailrace_cli.terminal.wire import Endpoint
from tailrace_protos.chat import ChatMessage, ToolCall
from tailrace_protos.session import ExportSession, ExportStyle


def chunk(delta: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {"id": "c1", "choices": [{"index": 0, "delta": delta, "finish_reason": None}], **fields}


FIRST, REST = {"name": "add", "arguments": '{"a"'}, {"arguments": ": 1}"}
CHAT: list[Any] = [
    chunk({"role": "assistant", "content": ""}),
    chunk({"content": "One "}),
    chunk({"content": "sum."}),
    chunk({"tool_calls": [{"index": 0, "id": "t1", "type": "function", "function": FIRST}]}),
    chunk({"tool_calls": [{"index": 0, "function": REST}]}),
    {"id": "c1", "choices": [{"index": 0, "delta": {}, "finish_reason": "tool_calls"}]},
    {"id": "c1", "choices": [], "usage": {"prompt_tokens": 21, "completion_tokens": 3}},
]
MESSAGES: list[Any] = [
    {"type": "message_start", "message": {"id": "c1", "content": []}},
    {"type": "message_stop"},
]
RESPONSES: list[Any] = [{"type": "response.created", "response": {"id": "c1"}}]


@asynccontextmanager
async def endpoint(events: list[Any]) -> AsyncIterator[str]:
    """Address of an endpoint that answers every call with these events."""

    async def answer(request: web.Request) -> web.Response:
        lines = [f"data: {json.dumps(event)}\n\n" for event in events]
        body = "".join([*lines, "data: [DONE]\n\n"])
        return web.Response(text=body, content_type="text/event-stream")

    app = web.Application()
    app.router.add_post("/v1/{path:.*}", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
    finally:
        await runner.cleanup()


async def relayed(path: str, events: list[Any]) -> tuple[Any, str]:
    """What the relay exports and shows after one call."""
    shown = io.StringIO()
    async with (
        endpoint(events) as url,
        Relay(Endpoint(url, "m", "key"), Screen(plain_console(file=shown, width=100))) as relay,
        aiohttp.ClientSession() as client,
    ):
        body = {"stream": True, "messages": [{"role": "user", "content": "1?"}]}
        async with client.post(f"{relay.base_url}/{path}", json=body) as response:
            assert response.status == 200
            await response.read()
        request = ExportSession("e1", {"": 1.0}, ExportStyle.CONCAT)
        return await relay.export(request), shown.getvalue()


@pytest.mark.parametrize("path", ["chat/completions", "chat/completions/"])
async def test_a_stream_is_a_call_and_is_shown_whole(path: str) -> None:
    exported, shown = await relayed(path, CHAT)
    assert exported.metrics["num_calls"] == 1
    assert exported.rewards == (1.0,)
    call = ToolCall("t1", "add", '{"a": 1}')
    assert exported.messages == (
        ChatMessage("user", "1?"),
        ChatMessage("assistant", "One sum.", (call,)),
    )
    assert "21 tokens in, 3 out, tool_calls" in shown
    assert 'add({"a": 1})' in shown


@pytest.mark.parametrize(
    "names", [("reasoning",), ("reasoning_content",), ("reasoning", "reasoning_content")]
)
async def test_streamed_thoughts_are_read_under_either_name(names: tuple[str, ...]) -> None:
    thoughts = [chunk(dict.fromkeys(names, text)) for text in ("I ", "add.")]
    exported, _ = await relayed("chat/completions", [*thoughts, *CHAT])
    assert exported.messages[1].reasoning == "I add."


@pytest.mark.parametrize(("path", "events"), [("messages", MESSAGES), ("responses", RESPONSES)])
async def test_a_stream_of_another_dialect_is_a_call(path: str, events: list[Any]) -> None:
    exported, _ = await relayed(path, events)
    assert exported.metrics["num_calls"] == 1


@pytest.mark.parametrize(
    ("path", "events"), [("chat/completions", [{"error": {"message": "full"}}]), ("tokenize", CHAT)]
)
async def test_what_brings_no_reply_is_no_call(path: str, events: list[Any]) -> None:
    exported, _ = await relayed(path, events)
    assert exported.metrics["num_calls"] == 0
