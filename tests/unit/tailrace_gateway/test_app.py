"""Routes by method and path."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from tailrace_gateway.adapters.app import HttpRoute, RouteTable
from tailrace_gateway.adapters.exchange import Exchange
from tailrace_gateway.core.errors import MethodError, NotFoundError, UnsupportedError


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


def exchange(method: str, path: str, headers: Sequence[tuple[bytes, bytes]] = ()) -> Exchange:
    async def unused(*_: object) -> None:
        raise AssertionError("nothing is read or sent")

    scope = {"type": "http", "method": method, "path": path, "headers": headers}
    return Exchange(scope, unused, unused, 1024)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("method", "path", "found", "params"),
    [
        ("POST", "/v1/things", "/v1/things", {}),
        ("GET", "/v1/things/a", "/v1/things/{thing}", {"thing": "a"}),
        ("DELETE", "/v1/things/a", "/v1/things/{thing}", {"thing": "a"}),
        ("GET", "/v1/models/org/name", "/v1/models/{model:path}", {"model": "org/name"}),
        ("POST", "/v1/things/", "/v1/things", {}),
        ("GET", "/v1/things/a//", "/v1/things/{thing}", {"thing": "a"}),
        ("HEAD", "/v1/things/a", "/v1/things/{thing}", {"thing": "a"}),
    ],
)
def test_a_path_finds_its_route_and_what_stands_in_it(
    method: str, path: str, found: str, params: dict[str, str]
) -> None:
    asked = exchange(method, path)
    assert TABLE.find(asked).path == found
    assert asked.params == params


@pytest.mark.parametrize(("path", "allowed"), [("/v1/things", "POST"), ("/v1/things/a", "GET, DELETE")])
def test_a_path_that_takes_another_method_says_which(path: str, allowed: str) -> None:
    with pytest.raises(MethodError, match=allowed) as refused:
        TABLE.find(exchange("PUT", path))
    assert refused.value.allowed == allowed


@pytest.mark.parametrize("path", ["/", "/v1/", "/v1/things/a/b", "/v1/other"])
def test_an_unknown_path_is_not_found(path: str) -> None:
    with pytest.raises(NotFoundError):
        TABLE.find(exchange("GET", path))


@pytest.mark.parametrize(
    "header",
    [
        (b"authorization", b"Bearer tr-1"),
        (b"authorization", b"bearer   tr-1 "),
        (b"authorization", b"\tBearer\ttr-1"),
        (b"x-api-key", b"tr-1"),
        (b"x-api-key", b" tr-1  "),
    ],
)
def test_spaces_around_a_key_are_not_part_of_it(header: tuple[bytes, bytes]) -> None:
    assert exchange("GET", "/", [header]).key == "tr-1"


@pytest.mark.parametrize("value", [b"", b" ", b"Bearer", b"Basic tr-1", b"tr-1"])
def test_another_authorization_leaves_the_other_header_to_hold_the_key(value: bytes) -> None:
    assert exchange("GET", "/", [(b"authorization", value)]).key == ""
    both = [(b"authorization", value), (b"x-api-key", b"tr-2")]
    assert exchange("GET", "/", both).key == "tr-2"


async def test_a_compressed_body_is_refused_by_its_header() -> None:
    with pytest.raises(UnsupportedError, match="send the body uncompressed") as refused:
        await exchange("POST", "/v1/things", [(b"content-encoding", b"gzip")]).body()
    assert refused.value.param == "Content-Encoding"
