"""Routes by method and path."""

from __future__ import annotations

import pytest

from tailrace_gateway.adapters.app import HttpRoute, MethodError, RouteTable
from tailrace_gateway.adapters.exchange import Exchange
from tailrace_gateway.core.errors import NotFoundError


async def nothing(exchange: Exchange) -> None:
    """Handler that does nothing."""


TABLE = RouteTable(
    [
        HttpRoute("POST", "/v1/things", nothing),
        HttpRoute("GET", "/v1/things/{thing}", nothing),
        HttpRoute("DELETE", "/v1/things/{thing}", nothing),
        HttpRoute("GET", "/v1/models/{model:path}", nothing),
    ]
)


def exchange(method: str, path: str) -> Exchange:
    async def unused(*_: object) -> None:
        raise AssertionError("nothing is read or sent")

    scope = {"type": "http", "method": method, "path": path, "headers": []}
    return Exchange(scope, unused, unused, 1024)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("method", "path", "found", "params"),
    [
        ("POST", "/v1/things", "/v1/things", {}),
        ("GET", "/v1/things/a", "/v1/things/{thing}", {"thing": "a"}),
        ("DELETE", "/v1/things/a", "/v1/things/{thing}", {"thing": "a"}),
        ("GET", "/v1/models/org/name", "/v1/models/{model:path}", {"model": "org/name"}),
    ],
)
def test_a_path_finds_its_route_and_what_stands_in_it(
    method: str, path: str, found: str, params: dict[str, str]
) -> None:
    asked = exchange(method, path)
    assert TABLE.find(asked).path == found
    assert asked.params == params


@pytest.mark.parametrize("path", ["/v1/things", "/v1/things/a"])
def test_a_path_that_takes_another_method_says_so(path: str) -> None:
    with pytest.raises(MethodError):
        TABLE.find(exchange("PUT", path))


@pytest.mark.parametrize("path", ["/", "/v1/things/", "/v1/things/a/b", "/v1/other"])
def test_an_unknown_path_is_not_found(path: str) -> None:
    with pytest.raises(NotFoundError):
        TABLE.find(exchange("GET", path))
