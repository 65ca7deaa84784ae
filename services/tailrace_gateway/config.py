"""Configuration of the gateway: the `gateway` section of an experiment file."""

from __future__ import annotations

from tailrace.config import Config


class GatewayConfig(Config, frozen=True, kw_only=True):
    """One gateway process."""

    host: str = "127.0.0.1"
    """Address to listen on."""

    port: int = 0
    """Port that all replicas on this host share; 0: the one in `TAILRACE_GATEWAY_PORT` (the local
    cluster reserves a free one), else any free one."""
