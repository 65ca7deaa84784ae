"""The door: every request shows its key before anything else is looked at, and every failure is told.

Keys come as `Authorization: Bearer` or `x-api-key`. A defect of a route becomes a 500 here.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Sequence
from typing import NamedTuple

from starlette.exceptions import HTTPException
from starlette.routing import BaseRoute, Route, Router
from starlette.types import Receive, Scope, Send

from tailrace.runtime.guard import Failure, Guard
from tailrace_gateway import metrics
from tailrace_gateway.adapters.http.exchange import ADMIN, Exchange
from tailrace_gateway.core.errors import ApiError, InternalError, NotFoundError, UnauthorizedError
from tailrace_gateway.core.keys import is_same_key
from tailrace_gateway.core.sessions import Sessions


class HttpRoute(NamedTuple):
    """A method and path and who answers them."""

    method: str
    path: str
    handler: Callable[[Exchange], Awaitable[None]]


class MethodError(ApiError):
    """The path exists, but not for this method."""

    status = 405
    code = "method_not_allowed"


class Door:
    """The ASGI application."""

    def __init__(
        self, sessions: Sessions, guard: Guard, routes: Sequence[HttpRoute], max_body_bytes: int
    ) -> None:
        self._sessions = sessions
        self._guard = guard
        self._max_body_bytes = max_body_bytes
        self.routes = tuple(routes)
        self._router = Router([_route(route) for route in routes], redirect_slashes=False)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            return
        exchange = Exchange(scope, receive, send, self._max_body_bytes)
        started_s = time.perf_counter()
        try:
            served = self._serve(exchange, scope, receive, send)
            result = await self._guard.run("http", served, expected=(ApiError,))
        except ApiError as error:
            await exchange.refuse(error)
        else:
            if isinstance(result, Failure):
                await exchange.refuse(
                    InternalError(f"{result.error_type}: the gateway's log says more")
                )
        self._count(scope, exchange, time.perf_counter() - started_s)

    async def _serve(self, exchange: Exchange, scope: Scope, receive: Receive, send: Send) -> None:
        exchange.caller = await self._caller(exchange)
        scope["app"] = self
        scope["exchange"] = exchange
        try:
            await self._router(scope, receive, send)
        except HTTPException as error:
            if error.status_code == 405:
                raise MethodError(f"{scope['method']} is not for {exchange.path}") from error
            raise NotFoundError(f"there is no {exchange.path} here") from error

    async def _caller(self, exchange: Exchange) -> str:
        """The session that the key opens, or `ADMIN`."""
        key = _key_of(exchange)
        if not key:
            raise UnauthorizedError(
                "no key: send the session's as 'Authorization: Bearer KEY' or 'x-api-key: KEY'",
                code="missing_api_key",
            )
        if is_same_key(key, self._sessions.identity.admin_key):
            return ADMIN
        return await self._sessions.id_of_key(key)

    def _count(self, scope: Scope, exchange: Exchange, took_s: float) -> None:
        endpoint = scope.get("endpoint")
        name = endpoint.path if isinstance(endpoint, _Endpoint) else "none"
        metrics.REQUESTS.labels(name, str(exchange.status)).inc()
        metrics.REQUEST_SECONDS.labels(name).observe(took_s)


def _key_of(exchange: Exchange) -> str:
    kind, _, key = exchange.headers.get("authorization", "").partition(" ")
    if kind.lower() == "bearer" and key.strip():
        return key.strip()
    return exchange.headers.get("x-api-key", "")


class _Endpoint:
    """A route's handler as ASGI, without the costs of a function endpoint."""

    def __init__(self, route: HttpRoute) -> None:
        self._handler = route.handler
        self.path = route.path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._handler(scope["exchange"])


def _route(route: HttpRoute) -> BaseRoute:
    return Route(route.path, _Endpoint(route), methods=[route.method])
