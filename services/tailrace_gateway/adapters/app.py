"""Gateway application: authenticates each request, finds its route, and reports each failure.

A key comes as `Authorization: Bearer` or as `x-api-key`, and is checked before anything else, except
for routes that are open to all. An unexpected exception of a route becomes a 500 response.
"""

import re
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import cache
from typing import NamedTuple

from prometheus_client import Counter, Histogram
from starlette.routing import compile_path
from starlette.types import Receive, Scope, Send

from tailrace.runtime.guard import Failure, Guard
from tailrace_gateway import metrics
from tailrace_gateway.adapters.exchange import ADMIN, Exchange
from tailrace_gateway.core.errors import (
    ApiError,
    InternalError,
    MethodError,
    NotFoundError,
    UnauthorizedError,
)
from tailrace_gateway.core.sessions import Sessions

EPISODES = "/v1/episodes"
EpisodeOfKey = Callable[[str], Awaitable[str]]  # raises `UnauthorizedError`


async def _no_episode(key: str) -> str:
    raise UnauthorizedError("this key belongs to no episode")


class GatewayApp:
    """ASGI application of the gateway."""

    def __init__(
        self,
        sessions: Sessions,
        guard: Guard,
        routes: "Sequence[HttpRoute]",
        max_body_bytes: int,
        episode_of_key: EpisodeOfKey = _no_episode,
    ) -> None:
        self._sessions = sessions
        self._episode_of_key = episode_of_key
        self._guard = guard
        self._max_body_bytes = max_body_bytes
        self.routes = tuple(routes)
        self._table = RouteTable(routes)
        self._open = frozenset(route.path for route in routes if route.is_open)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            return
        exchange = Exchange(scope, receive, send, self._max_body_bytes)
        started_s = time.perf_counter()
        try:
            result = await self._guard.run("http", self._serve(exchange), expected=(ApiError,))
        except ApiError as error:
            await exchange.send_error(error)
        else:
            if isinstance(result, Failure):
                reason = f"{result.error_type}: see the gateway's log"
                await exchange.send_error(InternalError(reason))
        _count(exchange.route, exchange.status, time.perf_counter() - started_s)

    async def _serve(self, exchange: Exchange) -> None:
        if exchange.path not in self._open:
            exchange.caller = await self._caller(exchange)
        route = self._table.find(exchange)
        exchange.route = route.path
        await route.handler(exchange)

    async def _caller(self, exchange: Exchange) -> str:
        """Return the session that the key opens, or `ADMIN`."""
        key = exchange.key
        if not key:
            raise UnauthorizedError(
                "no key: send the session's as 'Authorization: Bearer KEY' or 'x-api-key: KEY'",
                code="missing_api_key",
            )
        if self._sessions.is_admin(key):
            return ADMIN
        if exchange.path.startswith(EPISODES):  # its key outlives the episode's session
            return await self._episode_of_key(key)
        return self._sessions.known_id(key) or await self._sessions.id_of_key(key)


@cache
def _counters(route: str, status: int) -> tuple[Counter, Histogram]:
    """Return the metrics of a route and status; a label lookup costs more than an increment."""
    return metrics.REQUESTS.labels(route, str(status)), metrics.REQUEST_SECONDS.labels(route)


def _count(route: str, status: int, took_s: float) -> None:
    requests, seconds = _counters(route, status)
    requests.inc()
    seconds.observe(took_s)


class HttpRoute(NamedTuple):
    """Method, path and handler of one route.

    A `{name}` in the path matches one path segment, `{name:path}` the rest of the path.
    """

    method: str
    path: str
    handler: Callable[[Exchange], Awaitable[None]]
    is_open: bool = False  # needs no key


class RouteTable:
    """All routes of an application."""

    def __init__(self, routes: Sequence[HttpRoute]) -> None:
        fixed = [route for route in routes if "{" not in route.path]
        self._fixed = {(route.method, route.path): route for route in fixed}
        self._patterns: list[tuple[re.Pattern[str], HttpRoute]] = [
            (compile_path(route.path)[0], route) for route in routes if "{" in route.path
        ]

    def find(self, exchange: Exchange) -> HttpRoute:
        """Return a request's route and set its `params`; raise `MethodError` or `NotFoundError`.

        `HEAD` is a `GET` whose body the server leaves out.
        """
        method, path = "GET" if exchange.method == "HEAD" else exchange.method, exchange.path
        route = self._fixed.get((method, path))
        if route is not None:
            return route
        allowed = [known for known, fixed in self._fixed if fixed == path]
        for pattern, route in self._patterns:
            if found := pattern.match(path):
                if route.method == method:
                    exchange.params = found.groupdict()
                    return route
                allowed.append(route.method)
        if allowed:
            raise MethodError(method, path, allowed)
        raise NotFoundError(f"there is no {path} here")
