"""Addresses of a gateway's listener."""

from __future__ import annotations

from urllib.parse import urlsplit

import pytest

from tailrace.config import ConfigError
from tailrace_gateway.adapters.server import bind, origin_of


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1"])
def test_the_origin_of_a_listener_is_a_url_to_it(host: str) -> None:
    try:
        listener = bind(host, 0)
    except ConfigError:
        if ":" not in host:
            raise
        pytest.skip("this machine has no IPv6")
    with listener:
        found = urlsplit(origin_of(listener, host))
        assert (found.hostname, found.port) == (host, listener.getsockname()[1])
