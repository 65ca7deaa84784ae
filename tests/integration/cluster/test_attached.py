"""Servers that `--attach` names: what is missing is said of the right one."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tailrace.config import ConfigError
from tailrace_cli.cluster.attached import Attachment, claim
from tests.world.servers import ServerProcess, make_nats_server


async def test_a_user_without_jetstream_is_no_lack_of_redis(
    tmp_path: Path, redis_server: ServerProcess
) -> None:
    """NATS drops what its user may not send, so the request ends by its timeout."""
    users = '{users: [{user: a, password: b, permissions: {publish: "x"}}]}'
    (tmp_path / "users.conf").write_text(f"authorization: {users}\n")
    server = make_nats_server(tmp_path, "users.conf")
    await asyncio.to_thread(server.start)
    try:
        url = server.url.replace("nats://", "nats://a:b@")
        with pytest.raises(ConfigError, match="offers no JetStream") as refused:
            await claim(Attachment(url, redis_server.url), "run", is_new=True)
    finally:
        server.kill()
    assert "a:b" not in str(refused.value)
