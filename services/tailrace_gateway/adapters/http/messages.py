"""`POST /v1/messages` and `POST /v1/messages/count_tokens`."""

from __future__ import annotations

from tailrace_gateway.adapters.http.calls import CallRoute, Dialect
from tailrace_gateway.adapters.http.exchange import Exchange
from tailrace_gateway.adapters.http.routes import HttpRoute
from tailrace_gateway.core.anthropic_messages import (
    messages_answer,
    read_count_request,
    read_messages_request,
)
from tailrace_gateway.core.anthropic_stream import MessagesStream
from tailrace_gateway.core.calls import Calls


class CountRoute:
    """Counts the tokens of prompts."""

    def __init__(self, calls: Calls) -> None:
        self._calls = calls

    async def __call__(self, exchange: Exchange) -> None:
        """Answer one request."""
        session_id = exchange.require_session()
        call = read_count_request(await exchange.body())
        counted = await self._calls.count_tokens(session_id, call)
        await exchange.answer({"input_tokens": counted})


def message_routes(calls: Calls) -> list[HttpRoute]:
    """The routes of messages."""
    dialect = Dialect(read_messages_request, messages_answer, MessagesStream)
    return [
        HttpRoute("POST", "/v1/messages", CallRoute(calls, dialect)),
        HttpRoute("POST", "/v1/messages/count_tokens", CountRoute(calls)),
    ]
