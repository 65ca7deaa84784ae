"""The proxy of an address, by the variables that programs of all kinds read."""

from __future__ import annotations

import os

import pytest

from tailrace.proxy import proxy_for


@pytest.fixture(autouse=True)
def no_proxies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forget those of the machine that runs the tests."""
    for name in [name for name in os.environ if name.lower().endswith("_proxy")]:
        monkeypatch.delenv(name)


@pytest.mark.parametrize(
    ("given", "url", "proxy"),
    [
        ({}, "https://judge.example/v1", None),
        ({"https_proxy": "http://proxy:3128"}, "https://judge.example/v1", "http://proxy:3128"),
        ({"HTTPS_PROXY": "proxy:3128"}, "https://judge.example/v1", "http://proxy:3128"),
        ({"all_proxy": "http://me:key@proxy:1"}, "https://judge.example/v1", "http://me:key@proxy:1"),
        ({"https_proxy": "http://proxy:3128"}, "http://judge.example/v1", None),
        ({"all_proxy": "socks5://proxy:1080"}, "https://judge.example/v1", None),
        ({"http_proxy": "http://proxy:3128"}, "http://127.0.0.1:8000/v1", None),
        ({"http_proxy": "http://proxy:3128"}, "http://localhost/v1", None),
        ({"http_proxy": "http://proxy:3128"}, "http://[::1]:8000/v1", None),
        ({"http_proxy": "http://p:1", "no_proxy": ".example,other"}, "http://judge.example/v1", None),
        (
            {"http_proxy": "http://p:1", "no_proxy": "judge.example:8000"},
            "http://judge.example:8000",
            None,
        ),
    ],
)
def test_an_address_elsewhere_is_reached_as_the_environment_says(
    given: dict[str, str], url: str, proxy: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    assert proxy_for(url) == proxy
