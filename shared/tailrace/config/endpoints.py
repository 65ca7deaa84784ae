"""Where NATS and Redis are, and which host this is."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from pathlib import Path

from tailrace.config.base import Config, ConfigError


class Endpoints(Config, frozen=True, kw_only=True):
    """Where the servers are and who we are to them; comes from the environment, never from YAML."""

    nats_url: str
    nats_user: str = ""
    nats_password: str = ""
    redis_url: str
    host_id: str

    @classmethod
    def from_env(cls, env: Mapping[str, str] = os.environ) -> Endpoints:
        """Read `TAILRACE_NATS_URL`, `_NATS_USER`, `_NATS_PASSWORD`, `_REDIS_URL`, `_HOST_ID`."""
        missing = [key for key in ("TAILRACE_NATS_URL", "TAILRACE_REDIS_URL") if key not in env]
        if missing:
            raise ConfigError(
                f"{' and '.join(missing)} not set: services are started by `tailrace up` or "
                "`tailrace train`, or by the chart, which set them"
            )
        return cls(
            nats_url=env["TAILRACE_NATS_URL"],
            nats_user=env.get("TAILRACE_NATS_USER", ""),
            nats_password=env.get("TAILRACE_NATS_PASSWORD", ""),
            redis_url=env["TAILRACE_REDIS_URL"],
            host_id=env.get("TAILRACE_HOST_ID", "") or this_host_id(),
        )


def this_host_id() -> str:
    """Equal for two processes only if they can share memory: host name and boot id."""
    boot_id = Path("/proc/sys/kernel/random/boot_id")
    boot = boot_id.read_text().strip()[:8] if boot_id.exists() else "noboot"
    return f"{socket.gethostname()}-{boot}"
