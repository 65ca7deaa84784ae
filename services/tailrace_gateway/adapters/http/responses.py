"""`POST /v1/responses`."""

from __future__ import annotations

from functools import partial

from tailrace_gateway.adapters.http.calls import CallRoute, Dialect
from tailrace_gateway.adapters.http.routes import HttpRoute
from tailrace_gateway.core.calls import Calls
from tailrace_gateway.core.openai_answers import TokenText
from tailrace_gateway.core.openai_responses import read_response, response_answer
from tailrace_gateway.core.responses_stream import ResponseStream


def response_routes(calls: Calls, tokens: TokenText) -> list[HttpRoute]:
    """The routes of responses."""
    dialect = Dialect(
        read_response,
        partial(response_answer, tokens=tokens),
        partial(ResponseStream, tokens=tokens),
    )
    return [HttpRoute("POST", "/v1/responses", CallRoute(calls, dialect))]
