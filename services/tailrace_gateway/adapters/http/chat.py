"""`POST /v1/chat/completions`."""

from __future__ import annotations

from functools import partial

from tailrace_gateway.adapters.http.calls import CallRoute, Dialect
from tailrace_gateway.adapters.http.routes import HttpRoute
from tailrace_gateway.core.calls import Calls
from tailrace_gateway.core.openai_answers import TokenText
from tailrace_gateway.core.openai_chat import chat_answer, read_chat
from tailrace_gateway.core.openai_chat_stream import ChatStream


def chat_routes(calls: Calls, tokens: TokenText) -> list[HttpRoute]:
    """The routes of chat completions."""
    dialect = Dialect(
        read_chat, partial(chat_answer, tokens=tokens), partial(ChatStream, tokens=tokens)
    )
    return [HttpRoute("POST", "/v1/chat/completions", CallRoute(calls, dialect))]
