"""Routes that call the model, in all dialects, and the routes that describe it.

Requests may name any model: many agents have a fixed model name, and a run has one model.
"""

import asyncio
import hashlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

from tailrace.chat import Renderer
from tailrace.config import RunConfig
from tailrace_gateway import metrics
from tailrace_gateway.adapters.app import HttpRoute
from tailrace_gateway.adapters.exchange import Exchange
from tailrace_gateway.core.anthropic_messages import (
    MessagesStream,
    messages_answer,
    read_count_request,
    read_messages_request,
)
from tailrace_gateway.core.call import Completion, ModelCall
from tailrace_gateway.core.calls import ModelCalls
from tailrace_gateway.core.errors import ApiError, NotFoundError
from tailrace_gateway.core.in_flight import InFlightCall
from tailrace_gateway.core.openai_chat import ChatStream, chat_answer, read_chat
from tailrace_gateway.core.openai_completions import (
    CompletionStream,
    completion_answer,
    read_completion,
)
from tailrace_gateway.core.openai_responses import ResponseStream, read_response, response_answer
from tailrace_gateway.core.sse import StreamDialect

_CREATED = "1970-01-01T00:00:00Z"  # creation time of the model, which is not known


class Dialect(NamedTuple):
    """Functions of one dialect. `read` returns the body in the dialect's form and the call."""

    read: Callable[[bytes], tuple[Any, ModelCall]]
    answer: Callable[[Any, Completion], dict[str, Any]]
    stream: Callable[[Any], StreamDialect]


class CallRoute:
    """Route whose requests are model calls."""

    def __init__(self, calls: ModelCalls, dialect: Dialect) -> None:
        self._calls = calls
        self._dialect = dialect

    async def __call__(self, exchange: Exchange) -> None:
        """Answer one request."""
        session_id = exchange.require_session()
        raw = await exchange.body()
        body, call = self._dialect.read(raw)
        name, is_retry = _retry_mark(exchange, raw)
        streams = bool(body.stream)
        running = await self._calls.begin(session_id, call, name, is_retry=is_retry, streams=streams)
        listener = _Listener(running, exchange)
        try:
            if streams:
                await self._stream(exchange, body, running, listener)
            elif await listener.until_over():
                await exchange.send_json(self._dialect.answer(body, running.result()))
        finally:
            listener.end()

    async def _stream(
        self, exchange: Exchange, body: Any, running: InFlightCall, listener: "_Listener"
    ) -> None:
        opening = await running.opened()
        if opening is None:
            if not listener.is_gone:
                running.result()
            return
        dialect = self._dialect.stream(body)
        await exchange.begin_events()
        await exchange.send_events(dialect.begin(opening))
        async for piece in running.follow():
            if events := dialect.piece(piece):
                await exchange.send_events(events)
        if not listener.is_gone:
            await exchange.send_events(self._last_events(dialect, running), last=True)

    def _last_events(self, dialect: StreamDialect, running: InFlightCall) -> bytes:
        try:
            completion = running.result()
        except ApiError as error:
            return dialect.error(error)
        return b"".join(map(dialect.choice, completion.choices)) + dialect.end(completion)


class _Listener:
    """Listener of a call in flight; leaves the call when the client disconnects or has its response."""

    def __init__(self, running: InFlightCall, exchange: Exchange) -> None:
        assert running.task is not None
        self._running = running
        self._has_left = False
        self.is_gone = False
        self._over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        running.task.add_done_callback(self._on_over)
        self._watch = asyncio.create_task(exchange.gone())
        self._watch.add_done_callback(self._on_gone)

    async def until_over(self) -> bool:
        """Wait for the call; return False if the client disconnected first."""
        await self._over
        return not self.is_gone

    def end(self) -> None:
        """Stop listening."""
        self._watch.cancel()
        self._leave()

    def _on_over(self, _: object) -> None:
        if not self._over.done():
            self._over.set_result(None)

    def _on_gone(self, watch: asyncio.Task[None]) -> None:
        if watch.cancelled():
            return
        self.is_gone = True
        if not self._has_left:
            metrics.ABORTED.inc()
        self._leave()
        self._on_over(watch)

    def _leave(self) -> None:
        if not self._has_left:
            self._has_left = True
            self._running.leave()


def _retry_mark(exchange: Exchange, raw: bytes) -> tuple[str, bool]:
    """Return a name that a request shares with its retries, and whether this request can be a retry.

    Equal requests without a retry mark are separate samples: agents that vote send one request several
    times.
    """
    key = exchange.header(b"idempotency-key")
    digest = hashlib.blake2b(raw, digest_size=16)
    digest.update(f"\n{exchange.path}\n{key}".encode())
    count = exchange.header(b"x-stainless-retry-count")
    return digest.hexdigest(), bool(key) or (count.isdigit() and count.strip("0") != "")


class CountRoute:
    """Route that counts the tokens of prompts."""

    def __init__(self, calls: ModelCalls) -> None:
        self._calls = calls

    async def __call__(self, exchange: Exchange) -> None:
        """Answer one request."""
        session_id = exchange.require_session()
        call = read_count_request(await exchange.body())
        counted = await self._calls.count_tokens(session_id, call)
        await exchange.send_json({"input_tokens": counted})


class Models:
    """Routes that describe the run's one model."""

    def __init__(self, names: Sequence[str]) -> None:
        self._name = names[0]  # as the list shows it
        self._names = names

    async def list_models(self, exchange: Exchange) -> None:
        """Send the list of models."""
        model = self._model(exchange, self._name)
        listing: dict[str, Any] = {"object": "list", "data": [model]}
        if exchange.speaks_anthropic:
            listing = {
                "data": [model],
                "has_more": False,
                "first_id": self._name,
                "last_id": self._name,
            }
        await exchange.send_json(listing)

    async def show_model(self, exchange: Exchange) -> None:
        """Send one model."""
        wanted = exchange.params["model"]
        if wanted not in self._names:
            known = " or ".join(map(repr, self._names))
            raise NotFoundError(f"there is no model {wanted!r}, only {known}", code="model_not_found")
        await exchange.send_json(self._model(exchange, wanted))

    def _model(self, exchange: Exchange, name: str) -> dict[str, Any]:
        if exchange.speaks_anthropic:
            return {
                "type": "model",
                "id": name,
                "display_name": name,
                "created_at": _CREATED,
                "lifecycle": "active",
            }
        return {
            "id": name,
            "object": "model",
            "created": 0,
            "owned_by": "tailrace",
            "root": self._name,
        }


def model_call_routes(calls: ModelCalls, renderer: Renderer, run: RunConfig) -> list[HttpRoute]:
    """Return all routes except those of sessions and episodes."""
    text = renderer.token_text
    # The checkpoint, the run, and the name that examples use.
    models = Models(tuple(dict.fromkeys(filter(None, (run.pretrain, run.exp_name, "policy")))))

    async def health(exchange: Exchange) -> None:
        status = "draining" if calls.is_draining else "ok"
        await exchange.send_json({"status": status}, 503 if calls.is_draining else 200)

    dialects = {
        "/v1/chat/completions": Dialect(
            read_chat, partial(chat_answer, token_text=text), partial(ChatStream, token_text=text)
        ),
        "/v1/completions": Dialect(
            read_completion,
            partial(completion_answer, token_text=text),
            partial(CompletionStream, token_text=text),
        ),
        "/v1/responses": Dialect(
            read_response,
            partial(response_answer, token_text=text),
            partial(ResponseStream, token_text=text),
        ),
        "/v1/messages": Dialect(read_messages_request, messages_answer, MessagesStream),
    }
    return [
        *(HttpRoute("POST", path, CallRoute(calls, dialect)) for path, dialect in dialects.items()),
        HttpRoute("POST", "/v1/messages/count_tokens", CountRoute(calls)),
        HttpRoute("GET", "/health", health, is_open=True),
        HttpRoute("GET", "/v1/models", models.list_models),
        HttpRoute("GET", "/v1/models/{model:path}", models.show_model),
    ]
