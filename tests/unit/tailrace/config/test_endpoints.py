"""Addresses and credentials of a process, from its environment and from files."""

from __future__ import annotations

from pathlib import Path

import pytest

from tailrace.config import ConfigError, Endpoints, advertised_host

URLS = {"TAILRACE_NATS_URL": "nats://n:4222", "TAILRACE_REDIS_URL": "redis://r:6379/0"}


def test_passwords_come_from_files(tmp_path: Path) -> None:
    (tmp_path / "nats").write_text("n@ts\n")
    (tmp_path / "redis").write_text("r/dis\n")
    env = URLS | {
        "TAILRACE_NATS_USER": "agents",
        "TAILRACE_NATS_PASSWORD_FILE": str(tmp_path / "nats"),
        "TAILRACE_REDIS_USER": "agents",
        "TAILRACE_REDIS_PASSWORD_FILE": str(tmp_path / "redis"),
    }
    found = Endpoints.from_env(env)
    assert (found.nats_user, found.nats_password) == ("agents", "n@ts")
    assert found.redis_url == "redis://agents:r%2Fdis@r:6379/0"


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"TAILRACE_NATS_PASSWORD_FILE: cannot read .*gone"):
        Endpoints.from_env(URLS | {"TAILRACE_NATS_PASSWORD_FILE": str(tmp_path / "gone")})


def test_certificates_go_to_an_encrypted_redis_alone() -> None:
    ca = {"TAILRACE_CA_FILE": "/tls/ca.crt"}
    assert Endpoints.from_env(URLS | ca).redis_url == "redis://r:6379/0"
    encrypted = URLS | ca | {"TAILRACE_REDIS_URL": "rediss://r:6379/0"}
    assert Endpoints.from_env(encrypted).redis_url == "rediss://r:6379/0?ssl_ca_certs=/tls/ca.crt"


def test_a_url_with_credentials_stays_as_it_is() -> None:
    url = "redis://:secret@r:6379/0"
    assert Endpoints.from_env(URLS | {"TAILRACE_REDIS_URL": url}).redis_url == url


def test_an_address_on_which_no_service_listens_is_refused_by_name() -> None:
    with pytest.raises(
        ConfigError, match=r"TAILRACE_ADVERTISE_HOST is fd00::7: services listen on IPv4"
    ):
        Endpoints.from_env(URLS | {"TAILRACE_ADVERTISE_HOST": "fd00::7"})
    for host in ("10.1.2.3", "the-pod"):
        Endpoints.from_env(URLS | {"TAILRACE_ADVERTISE_HOST": host})


def test_a_pod_tells_its_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TAILRACE_ADVERTISE_HOST", "10.1.2.3")
    assert advertised_host() == "10.1.2.3"
