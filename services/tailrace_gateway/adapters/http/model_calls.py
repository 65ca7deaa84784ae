"""The routes that call the model, in all dialects."""

from __future__ import annotations

from tailrace.chat import Renderer
from tailrace_gateway.adapters.http.chat import chat_routes
from tailrace_gateway.adapters.http.completions import completion_routes
from tailrace_gateway.adapters.http.messages import message_routes
from tailrace_gateway.adapters.http.models import model_routes
from tailrace_gateway.adapters.http.responses import response_routes
from tailrace_gateway.adapters.http.routes import HttpRoute
from tailrace_gateway.core.calls import Calls


def model_call_routes(calls: Calls, renderer: Renderer, model_name: str) -> list[HttpRoute]:
    """Everything but the routes of sessions."""
    return [
        *chat_routes(calls, renderer),
        *completion_routes(calls, renderer),
        *response_routes(calls, renderer),
        *message_routes(calls),
        *model_routes(model_name),
    ]
