"""The embedded nats-server lets each user do its own work and nothing else."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import nats
import nats.errors
import pytest
from nats.aio.client import Client

from tailrace_cli.cluster.servers import Credentials, choose_port, nats_command
from tailrace_cli.config import ClusterConfig
from tests.conftest import ServerProcess

RUN = "guarded"


class Guarded:
    """A nats-server with one user per service, and connections that collect refusals."""

    def __init__(self, server: ServerProcess, keys: Credentials) -> None:
        self._server = server
        self._keys = keys
        self._clients: list[Client] = []
        self.refused: list[str] = []
        self.refusal = asyncio.Event()

    async def connect(self, user: str) -> Client:
        async def on_error(error: Exception) -> None:
            self.refused.append(str(error))
            self.refusal.set()

        client = await nats.connect(
            self._server.url,
            user=user,
            password=self._keys.nats[user],
            inbox_prefix=f"_INBOX.{user}".encode(),
            error_cb=on_error,
        )
        self._clients.append(client)
        return client

    async def close(self) -> None:
        for client in self._clients:
            await client.close()
        self._server.kill()


@pytest.fixture
async def guarded(tmp_path: Path) -> AsyncIterator[Guarded]:
    keys = Credentials.load_or_make(tmp_path)
    port = choose_port(0, "test")
    server = ServerProcess(
        nats_command(ClusterConfig(), tmp_path, port, RUN, keys), port, f"nats://127.0.0.1:{port}"
    )
    server.start()
    made = Guarded(server, keys)
    yield made
    await made.close()


async def test_nobody_gets_in_without_a_password(guarded: Guarded) -> None:
    with pytest.raises((nats.errors.Error, ConnectionError)):
        await nats.connect(
            guarded._server.url,
            user="agents",
            password="guess",
            allow_reconnect=False,
            connect_timeout=5,
        )


@pytest.mark.parametrize(
    ("user", "subject"),
    [
        ("reward", f"{RUN}.episodes.train"),
        ("agents", f"{RUN}.events"),
        ("inference", f"{RUN}.weight_sync.offer"),
        ("agents", f"$JS.API.STREAM.DELETE.{RUN}_EVENTS"),
        ("learner", "other.weight_sync.offer"),
    ],
)
async def test_publishing_on_anothers_subject_is_refused(
    guarded: Guarded, user: str, subject: str
) -> None:
    client = await guarded.connect(user)
    await client.publish(subject, b"forged")
    await client.flush()
    await asyncio.wait_for(guarded.refusal.wait(), 5)
    assert "permissions violation" in guarded.refused[0].lower()


async def test_listening_to_anothers_replies_is_refused(guarded: Guarded) -> None:
    client = await guarded.connect("reward")
    await client.subscribe("_INBOX.agents.>")
    await client.flush()
    await asyncio.wait_for(guarded.refusal.wait(), 5)
    assert "permissions violation" in guarded.refused[0].lower()


async def test_a_request_and_its_reply_pass(guarded: Guarded) -> None:
    reward, agents = await guarded.connect("reward"), await guarded.connect("agents")

    async def answer(message: nats.aio.msg.Msg) -> None:
        await message.respond(b"scored")

    await reward.subscribe(f"{RUN}.reward.score", cb=answer)
    await reward.flush()
    reply = await agents.request(f"{RUN}.reward.score", b"", timeout=5)
    assert reply.data == b"scored"
    assert guarded.refused == []


async def test_credentials_are_made_once_and_readable_by_their_owner_only(tmp_path: Path) -> None:
    first = Credentials.load_or_make(tmp_path)
    assert Credentials.load_or_make(tmp_path) == first
    assert (tmp_path / "credentials.json").stat().st_mode & 0o777 == 0o600
    assert len(set(first.nats.values())) == len(first.nats)
