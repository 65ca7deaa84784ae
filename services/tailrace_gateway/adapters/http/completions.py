"""`POST /v1/completions`."""

from __future__ import annotations

from functools import partial

from tailrace_gateway.adapters.http.calls import CallRoute, Dialect
from tailrace_gateway.adapters.http.routes import HttpRoute
from tailrace_gateway.core.calls import Calls
from tailrace_gateway.core.openai_answers import TokenText
from tailrace_gateway.core.openai_completions import (
    CompletionStream,
    completion_answer,
    read_completion,
)


def completion_routes(calls: Calls, tokens: TokenText) -> list[HttpRoute]:
    """The routes of completions."""
    dialect = Dialect(
        read_completion,
        partial(completion_answer, tokens=tokens),
        partial(CompletionStream, tokens=tokens),
    )
    return [HttpRoute("POST", "/v1/completions", CallRoute(calls, dialect))]
