"""The embedded nats-server lets each user do its own work and nothing else."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import nats
import nats.errors
import pytest
from nats.aio.client import Client

from tailrace.bus import flush
from tailrace_cli.cluster.servers import Credentials, choose_port, nats_command
from tailrace_cli.config import ClusterConfig
from tests.world.servers import ServerProcess

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
        ("gateway", f"{RUN}.episodes.train"),
        ("sandbox", f"{RUN}.gateway.open"),
        ("tools", f"{RUN}.scheduler.lease"),
        ("tools", "_INBOX.agents.anything"),
    ],
)
async def test_publishing_on_anothers_subject_is_refused(
    guarded: Guarded, user: str, subject: str
) -> None:
    client = await guarded.connect(user)
    await client.publish(subject, b"forged")
    await flush(client)
    await asyncio.wait_for(guarded.refusal.wait(), 5)
    assert "permissions violation" in guarded.refused[0].lower()


@pytest.mark.parametrize(
    ("user", "subject"),
    [
        ("reward", "_INBOX.agents.>"),
        ("tools", f"{RUN}.gateway.>"),
        ("tools", f"{RUN}.reward.score"),
        ("sandbox", "other.tool.python"),
    ],
)
async def test_listening_to_what_is_for_others_is_refused(
    guarded: Guarded, user: str, subject: str
) -> None:
    client = await guarded.connect(user)
    await client.subscribe(subject)
    await flush(client)
    await asyncio.wait_for(guarded.refusal.wait(), 5)
    assert "permissions violation" in guarded.refused[0].lower()


async def answer_to(client: Client, subject: str) -> nats.aio.msg.Msg:
    """The answer to an empty request, asked again while the server does not know the listener yet."""
    async with asyncio.timeout(10):
        while True:
            try:
                return await client.request(subject, b"", timeout=5)
            except nats.errors.NoRespondersError:
                await asyncio.sleep(0.05)


@pytest.mark.parametrize(
    ("asks", "answers", "subject"),
    [
        ("agents", "reward", f"{RUN}.reward.score"),
        ("reward", "gateway", f"{RUN}.gateway.open"),
        ("agents", "gateway", f"{RUN}.gateway.open"),
        ("gateway", "scheduler", f"{RUN}.scheduler.lease"),
        ("agents", "tools", "tool.search"),
        ("agents", "sandbox", f"{RUN}.tool.python"),
        ("cli", "tools", "tool_worker.w0"),
    ],
)
async def test_a_request_and_its_reply_pass(
    guarded: Guarded, asks: str, answers: str, subject: str
) -> None:
    server, client = await guarded.connect(answers), await guarded.connect(asks)

    async def answer(message: nats.aio.msg.Msg) -> None:
        await message.respond(b"done")

    await server.subscribe(subject, cb=answer)
    await flush(server)
    reply = await answer_to(client, subject)
    assert reply.data == b"done"
    assert guarded.refused == []


async def test_a_call_may_be_answered_twice_and_streamed_tokens_reach_the_gateway(
    guarded: Guarded,
) -> None:
    tools, agents = await guarded.connect("tools"), await guarded.connect("agents")
    inference, gateway = await guarded.connect("inference"), await guarded.connect("gateway")

    async def answer(message: nats.aio.msg.Msg) -> None:
        await message.respond(b"accepted")
        await message.respond(b"result")

    await tools.subscribe("tool.slow", cb=answer)
    await flush(tools)
    replies = await agents.subscribe("_INBOX.agents.call")
    await agents.publish("tool.slow", b"", reply="_INBOX.agents.call")
    assert [(await replies.next_msg(5)).data for _ in range(2)] == [b"accepted", b"result"]
    tokens = await gateway.subscribe("_INBOX.gateway.tokens")
    await flush(gateway)
    await inference.publish("_INBOX.gateway.tokens", b"7")
    assert (await tokens.next_msg(5)).data == b"7"
    assert guarded.refused == []


async def test_users_that_an_earlier_version_did_not_know_are_added(tmp_path: Path) -> None:
    first = Credentials.load_or_make(tmp_path)
    older = msgspec.structs.replace(
        first, nats={user: key for user, key in first.nats.items() if user != "gateway"}
    )
    (tmp_path / "credentials.json").write_bytes(msgspec.json.encode(older))
    again = Credentials.load_or_make(tmp_path)
    assert again.nats.keys() == first.nats.keys()
    assert again.nats["agents"] == first.nats["agents"]
    assert again.redis == first.redis


async def test_credentials_are_made_once_and_readable_by_their_owner_only(tmp_path: Path) -> None:
    first = Credentials.load_or_make(tmp_path)
    assert Credentials.load_or_make(tmp_path) == first
    assert (tmp_path / "credentials.json").stat().st_mode & 0o777 == 0o600
    assert len(set(first.nats.values())) == len(first.nats)
