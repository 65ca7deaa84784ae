"""The agents' HTTP client against a real server: streams, limits, errors, SDKs."""

from __future__ import annotations

import asyncio
import gzip
import importlib.util
import json
from collections.abc import AsyncIterator
from typing import Any

import anthropic
import openai
import pytest
from aiohttp import web

from tailrace.config import ConfigError
from tailrace.sdk import http
from tests.world.servers import free_port

LIBRARIES = [name for name in ("httpx2", "httpx") if importlib.util.find_spec(name)]


class Server:
    """Answers by path; remembers who came and who went away."""

    def __init__(self) -> None:
        self.url = ""
        self.peers: list[Any] = []
        self.bodies: list[bytes] = []
        self.arrived = asyncio.Event()
        self.num_arrived = 0
        self.gone = asyncio.Event()
        self.release = asyncio.Event()

    async def handle(self, request: web.Request) -> web.StreamResponse:
        assert request.transport is not None
        self.peers.append(request.transport.get_extra_info("peername"))
        self.bodies.append(await request.read())
        self.num_arrived += 1
        self.arrived.set()
        answer: web.StreamResponse = await getattr(self, f"_{request.path.split('/')[-1]}")(request)
        return answer

    async def _echo(self, request: web.Request) -> web.Response:
        headers = {
            "x-seen": request.headers.get("x-mine", ""),
            "x-agent": request.headers["user-agent"],
        }
        return web.Response(body=self.bodies[-1], headers=headers, status=201)

    async def _zipped(self, request: web.Request) -> web.Response:
        return web.Response(body=gzip.compress(b"plain"), headers={"content-encoding": "gzip"})

    async def _moved(self, request: web.Request) -> web.Response:
        return web.Response(status=307, headers={"location": "/echo"})

    async def _waits(self, request: web.Request) -> web.Response:
        try:
            await self.release.wait()
        except asyncio.CancelledError:
            self.gone.set()
            raise
        return web.Response(text="done")

    async def _cut(self, request: web.Request) -> web.StreamResponse:
        answer = web.StreamResponse(headers={"content-length": "100"})
        await answer.prepare(request)
        await answer.write(b"only this")
        assert request.transport is not None
        request.transport.close()
        return answer

    async def _pieces(self, request: web.Request) -> web.StreamResponse:
        answer = web.StreamResponse()
        await answer.prepare(request)
        try:
            await answer.write(b"first")
            await self.release.wait()
            await answer.write(b"second")
        except (asyncio.CancelledError, ConnectionError):
            self.gone.set()
            raise
        return answer

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        asked = json.loads(self.bodies[-1])
        made = {"id": "c1", "created": 1, "model": "m"}
        message = {"role": "assistant", "content": "Hello"}
        if not asked.get("stream"):
            choice = {"index": 0, "message": message, "finish_reason": "stop"}
            return web.json_response({**made, "object": "chat.completion", "choices": [choice]})
        answer = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await answer.prepare(request)
        for piece in ("Hel", "lo"):
            choice = {"index": 0, "delta": {"content": piece}, "finish_reason": None}
            data = {**made, "object": "chat.completion.chunk", "choices": [choice]}
            await answer.write(f"data: {json.dumps(data)}\n\n".encode())
        await answer.write(b"data: [DONE]\n\n")
        return answer

    async def _messages(self, request: web.Request) -> web.Response:
        return web.json_response(
            {
                "id": "m1", "type": "message", "role": "assistant", "model": "m",
                "content": [{"type": "text", "text": "Hello"}], "stop_reason": "end_turn",
                "stop_sequence": None, "usage": {"input_tokens": 1, "output_tokens": 1},
            }
        )  # fmt: skip


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    made = Server()
    app = web.Application(client_max_size=1 << 26, handler_args={"handler_cancellation": True})
    app.router.add_route("*", "/{path:.*}", made.handle)
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    port = free_port()
    await web.TCPSite(runner, "127.0.0.1", port, backlog=4096).start()
    made.url = f"http://127.0.0.1:{port}"
    yield made
    made.release.set()
    await runner.cleanup()


@pytest.fixture(params=LIBRARIES)
async def library(request: pytest.FixtureRequest) -> Any:
    return importlib.import_module(request.param)


@pytest.fixture
async def client(library: Any) -> AsyncIterator[Any]:
    async with http.make_http_client(library.__name__) as made:
        yield made


async def test_bodies_headers_and_statuses_arrive_as_they_were_sent(
    server: Server, client: Any
) -> None:
    answer = await client.post(f"{server.url}/echo?a=%2Fb", content=b"body", headers={"x-mine": "v"})
    assert (answer.status_code, answer.content) == (201, b"body")
    assert answer.headers["x-seen"] == "v"
    assert answer.headers["x-agent"] == client.headers["user-agent"]
    assert answer.reason_phrase == "Created"


async def test_an_uploaded_stream_arrives_whole(server: Server, client: Any) -> None:
    async def parts() -> AsyncIterator[bytes]:
        yield b"one, "
        yield b"two"

    assert (await client.post(f"{server.url}/echo", content=parts())).content == b"one, two"


async def test_compressed_answers_and_redirects_are_httpx_matter(server: Server, client: Any) -> None:
    assert (await client.get(f"{server.url}/zipped")).text == "plain"
    assert (await client.get(f"{server.url}/moved", follow_redirects=False)).status_code == 307
    assert (await client.post(f"{server.url}/moved", content=b"again")).content == b"again"


async def test_connections_are_used_again(server: Server, client: Any) -> None:
    for _ in range(5):
        await client.get(f"{server.url}/echo")
    assert len(set(server.peers)) == 1


async def test_an_answer_streams_while_it_is_made(server: Server, client: Any) -> None:
    async with client.stream("GET", f"{server.url}/pieces") as answer:
        pieces = answer.aiter_raw()
        assert await anext(pieces) == b"first"
        server.release.set()
        assert await anext(pieces) == b"second"


async def test_leaving_a_stream_early_shows_at_the_server(server: Server, client: Any) -> None:
    async with client.stream("GET", f"{server.url}/pieces") as answer:
        assert await anext(answer.aiter_raw()) == b"first"
    await asyncio.wait_for(server.gone.wait(), 60)


async def test_cancelling_a_request_shows_at_the_server(server: Server, client: Any) -> None:
    asking = asyncio.create_task(client.get(f"{server.url}/waits"))
    await server.arrived.wait()
    asking.cancel()
    await asyncio.wait_for(server.gone.wait(), 60)
    with pytest.raises(asyncio.CancelledError):
        await asking


async def test_a_thousand_requests_wait_together(server: Server, client: Any) -> None:
    asking = [asyncio.create_task(client.get(f"{server.url}/waits")) for _ in range(1000)]
    async with asyncio.timeout(60):
        while server.num_arrived < 1000:
            await asyncio.sleep(0.02)
    server.release.set()
    assert {answer.text for answer in await asyncio.gather(*asking)} == {"done"}


async def test_failures_are_of_the_types_that_users_catch(
    server: Server, client: Any, library: Any
) -> None:
    with pytest.raises(library.ConnectError):
        await client.get(f"http://127.0.0.1:{free_port()}/")
    patience = library.Timeout(20.0, read=0.05)
    for path in ("waits", "pieces"):
        with pytest.raises(library.ReadTimeout):
            await client.get(f"{server.url}/{path}", timeout=patience)
    with pytest.raises(library.RemoteProtocolError):
        await client.get(f"{server.url}/cut")
    with pytest.raises(library.UnsupportedProtocol):
        await client.get("ftp://127.0.0.1/")


async def test_the_openai_sdk_takes_it(server: Server, client: Any) -> None:
    sdk = openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="k", http_client=client)
    asked: Any = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
    whole = await sdk.chat.completions.create(**asked)
    assert whole.choices[0].message.content == "Hello"
    stream = await sdk.chat.completions.create(**asked, stream=True)
    assert "".join([part.choices[0].delta.content async for part in stream]) == "Hello"


async def test_the_anthropic_sdk_takes_the_client_it_gets_by_default(server: Server) -> None:
    async with http.make_http_client() as client:
        sdk = anthropic.AsyncAnthropic(base_url=server.url, api_key="k", http_client=client)
        message = await sdk.messages.create(
            model="m", max_tokens=5, messages=[{"role": "user", "content": "hi"}]
        )
    assert message.content[0].type == "text"
    assert message.content[0].text == "Hello"


async def test_another_event_loop_and_a_closed_client_are_refused_with_the_reason(
    server: Server, client: Any
) -> None:
    await client.get(f"{server.url}/echo")

    def elsewhere() -> None:
        asyncio.run(client.get(f"{server.url}/echo"))

    with pytest.raises(RuntimeError, match="make a client of your own"):
        await asyncio.to_thread(elsewhere)


def test_a_library_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    monkeypatch.setattr(http.importlib, "import_module", missing)
    with pytest.raises(ConfigError, match="httpx2 or httpx is not installed: pip install httpx2"):
        http.make_http_client()
