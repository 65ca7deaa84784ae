"""Servers forget a run with the rights of the user `cli`, and keep every other run."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from redis import Redis

from tailrace.bus import Bus, StreamLimits
from tailrace.config import Endpoints
from tailrace_cli.cluster.servers import Credentials, nats_command, redis_command
from tailrace_cli.commands.forget import forget
from tailrace_cli.config import ClusterConfig
from tailrace_protos import subjects
from tests.world.servers import ServerProcess, free_port

RUN = "gone"


@pytest.fixture
def users(tmp_path: Path) -> Iterator[dict[str, Endpoints]]:
    """Endpoints of each user of a NATS and a Redis as a run starts them."""
    keys, config = Credentials.load_or_make(tmp_path), ClusterConfig()
    ports = free_port(), free_port()
    url = f"nats://127.0.0.1:{ports[0]}"
    servers = [
        ServerProcess(nats_command(config, tmp_path, ports[0], RUN, keys), ports[0], url),
        ServerProcess(redis_command(config, tmp_path, ports[1], RUN, keys), ports[1], ""),
    ]
    for server in servers:
        server.start()
    yield {
        user: Endpoints(
            nats_url=url,
            nats_user=user,
            nats_password=keys.nats[user],
            redis_url=f"redis://{user}:{keys.redis[user]}@127.0.0.1:{ports[1]}/0",
            host_id="here",
        )
        for user in ("cli", "scheduler", "learner")
    }
    for server in servers:
        server.kill()


async def test_a_run_is_forgotten_and_can_be_forgotten_again(users: dict[str, Endpoints]) -> None:
    bus = await Bus.connect(users["scheduler"], name="scheduler", run=RUN)
    await bus.provision_run(RUN, StreamLimits())
    with Redis.from_url(users["learner"].redis_url) as learner:
        learner.set(f"{subjects.redis_prefix(RUN)}model_card", "x")
        assert await forget(users["cli"], RUN, quiet_s=0.0) == 1 + len(subjects.streams(RUN))
        assert learner.get(f"{subjects.redis_prefix(RUN)}model_card") is None
    assert await forget(users["cli"], RUN, quiet_s=0.0) == 0
    await bus.provision_run(RUN, StreamLimits())  # the name is free
    await bus.close()
