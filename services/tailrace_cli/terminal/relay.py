"""Relay between a workflow and an endpoint: passes calls on with the model's name, and shows them.

Invariants: the workflow gets the endpoint's bytes unchanged; the endpoint's key stays in the relay.
"""

import json
from asyncio import Event
from collections.abc import Mapping
from types import TracebackType
from typing import Any

import aiohttp
from aiohttp import web

from tailrace.proxy import proxy_for
from tailrace_agents.core.workflow_player import SessionFailedError
from tailrace_cli.terminal.screen import Screen
from tailrace_cli.terminal.wire import (
    TIMEOUT_S,
    Endpoint,
    read_answer,
    read_message,
    read_object,
)
from tailrace_protos.chat import ChatMessage
from tailrace_protos.session import ExportSession, OpenSession, SessionExport, SessionOpened

_MAX_BODY_BYTES = 64 << 20
_SHUTDOWN_S = 1.0  # until calls that nobody waits for are given up
_CHAT = "chat/completions"
_CALLS = (_CHAT, "completions", "responses", "messages")


class Relay:
    """`EpisodeSessions` of a workflow player; while it is entered, it serves at `base_url`."""

    def __init__(self, endpoint: Endpoint, screen: Screen) -> None:
        self.base_url = ""
        self._endpoint = endpoint
        self._screen = screen
        self._conversation: list[ChatMessage] = []
        self._completion_ids: list[str] = []  # of every call
        self._num_in_flight = 0
        self._is_idle = Event()
        self._is_idle.set()
        app = web.Application(client_max_size=_MAX_BODY_BYTES)
        app.router.add_route("*", "/v1/{path:.*}", self._serve)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=_SHUTDOWN_S)

    async def __aenter__(self) -> "Relay":
        self._session = aiohttp.ClientSession(
            timeout=aiohttp.ClientTimeout(total=TIMEOUT_S), auto_decompress=False
        )
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.base_url = f"http://127.0.0.1:{self._runner.addresses[0][1]}/v1"
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._runner.cleanup()
        await self._session.close()

    async def open(self, request: OpenSession, *, anew: bool) -> SessionOpened:
        """See `EpisodeSessions`."""
        return SessionOpened(request.episode_id, self.base_url, "terminal")

    async def export(self, request: ExportSession) -> SessionExport:
        """See `EpisodeSessions`; there are no rows, since the tokens are not known.

        A workflow may end before the relay has read the last answer to its end: it waits for that.
        """
        await self._is_idle.wait()
        last = self._completion_ids[-1] if self._completion_ids else ""
        rewards = {(name or last): reward for name, reward in request.rewards.items()}
        for name in rewards:
            if self._completion_ids and name not in self._completion_ids:
                raise SessionFailedError(f"the workflow rewarded {name!r}, but no call has that id")
        return SessionExport(
            messages=tuple(self._conversation),
            rewards=tuple(rewards[name] for name in self._completion_ids if name in rewards),
            metrics={"num_calls": float(len(self._completion_ids))},
        )

    def close(self, opened: SessionOpened) -> None:
        """See `EpisodeSessions`."""

    async def _serve(self, request: web.Request) -> web.StreamResponse:
        self._num_in_flight += 1
        self._is_idle.clear()
        try:
            return await self._pass_on(request)
        finally:
            self._num_in_flight -= 1
            if not self._num_in_flight:
                self._is_idle.set()

    async def _pass_on(self, request: web.Request) -> web.StreamResponse:
        path, body = request.match_info["path"].rstrip("/"), await request.read()
        asked = read_object(body)
        if asked:
            asked["model"] = self._endpoint.model
            body = json.dumps(asked).encode()
        url = f"{self._endpoint.url.rstrip('/')}/{path}"
        key = self._endpoint.api_key
        headers = {"Authorization": f"Bearer {key}", "x-api-key": key, "Accept-Encoding": "identity"}
        headers["Content-Type"] = request.headers.get("Content-Type", "application/json")
        try:
            async with self._session.request(
                request.method, url, data=body, headers=headers, proxy=proxy_for(url)
            ) as answer:
                return await self._answer(request, path, asked, answer)
        except (aiohttp.ClientError, TimeoutError) as error:
            reason = f"{url}: {type(error).__name__}: {error}"
            self._screen.line(reason)
            return web.json_response({"error": {"message": reason}}, status=502)

    async def _answer(
        self, request: web.Request, path: str, asked: dict[str, Any], answer: aiohttp.ClientResponse
    ) -> web.StreamResponse:
        response = web.StreamResponse(status=answer.status)
        response.content_type = answer.content_type
        pieces: list[bytes] = []
        try:
            await response.prepare(request)
            async for piece in answer.content.iter_any():
                pieces.append(piece)
                await response.write(piece)
            await response.write_eof()
        except ConnectionResetError:  # the workflow has left: its call counts, a stream goes no further
            if answer.content_type != "text/event-stream":
                pieces.append(await answer.read())
        is_call = path in _CALLS and answer.status == 200
        told = read_answer(b"".join(pieces)) if is_call else {}
        if told.get("id") or told.get("choices"):
            self._completion_ids.append(told.get("id", ""))
        if path == _CHAT and told.get("choices"):
            self._show(asked, told)
        else:
            self._screen.line(
                f"{request.method} {path}: {answer.status}, {sum(map(len, pieces))} bytes"
            )
        return response

    def _show(self, asked: Mapping[str, Any], told: Mapping[str, Any]) -> None:
        messages = [read_message(message) for message in asked.get("messages", ())]
        self._screen.continued(self._conversation, messages)
        choice, usage = told["choices"][0], told.get("usage") or {}
        reply = read_message(choice["message"])
        self._conversation = [*messages, reply]
        num_prompt, num_sampled = usage.get("prompt_tokens", 0), usage.get("completion_tokens", 0)
        counts = f"{num_prompt} tokens in, {num_sampled} out, {choice.get('finish_reason')}"
        self._screen.reply(reply, counts)
