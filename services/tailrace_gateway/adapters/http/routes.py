"""Which handler answers a method and a path: fixed paths at once, the others by their pattern."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Sequence
from typing import NamedTuple

from starlette.routing import compile_path

from tailrace_gateway.adapters.http.exchange import Exchange
from tailrace_gateway.core.errors import ApiError, NotFoundError


class HttpRoute(NamedTuple):
    """A method and path and who answers them.

    In a path `{name}` matches what stands between slashes, `{name:path}` the whole rest.
    """

    method: str
    path: str
    handler: Callable[[Exchange], Awaitable[None]]


class MethodError(ApiError, status=405, code="method_not_allowed"):
    """The path exists, but not for this method."""


class RouteTable:
    """All routes of an application."""

    def __init__(self, routes: Sequence[HttpRoute]) -> None:
        fixed = [route for route in routes if "{" not in route.path]
        self._fixed = {(route.method, route.path): route for route in fixed}
        self._patterns: list[tuple[re.Pattern[str], HttpRoute]] = [
            (compile_path(route.path)[0], route) for route in routes if "{" in route.path
        ]

    def find(self, exchange: Exchange) -> HttpRoute:
        """The route of a request, whose `params` are set; raises `MethodError` or `NotFoundError`."""
        method, path = exchange.method, exchange.path
        route = self._fixed.get((method, path))
        if route is not None:
            return route
        is_known = any(known == path for _, known in self._fixed)
        for pattern, route in self._patterns:
            if found := pattern.match(path):
                if route.method == method:
                    exchange.params = found.groupdict()
                    return route
                is_known = True
        if is_known:
            raise MethodError(f"{exchange.method} is not for {path}")
        raise NotFoundError(f"there is no {path} here")
