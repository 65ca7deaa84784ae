"""The embedded nats-server lets each user do its own work and nothing else."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import msgspec
import nats
import nats.errors
import pytest
from nats.aio.client import Client
from redis import Redis
from redis.exceptions import AuthenticationError, ResponseError

from tailrace.bus import flush
from tailrace.store import Outbox, TrajectoryBuffer, connect
from tailrace_cli.cluster.permissions import SERVICE_USERS
from tailrace_cli.cluster.servers import Credentials, nats_command, redis_command
from tailrace_cli.config import ClusterConfig
from tests.world.servers import ServerProcess, free_port

RUN = "guarded"
MEDDLING = ("CREATE", "UPDATE", "DELETE", "PURGE", "MSG.DELETE", "RESTORE", "SNAPSHOT")


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


def _guarded(folder: Path, config: ClusterConfig) -> Guarded:
    keys = Credentials.load_or_make(folder)
    port = free_port()
    server = ServerProcess(
        nats_command(config, folder, port, RUN, keys), port, f"nats://127.0.0.1:{port}"
    )
    server.start()
    return Guarded(server, keys)


@pytest.fixture
async def guarded(tmp_path: Path) -> AsyncIterator[Guarded]:
    made = _guarded(tmp_path, ClusterConfig())
    yield made
    await made.close()


async def test_nobody_gets_in_without_a_password(guarded: Guarded) -> None:
    with pytest.raises((nats.errors.Error, ConnectionError)):
        await nats.connect(
            guarded._server.url,
            user="agents",
            password="guess",
            allow_reconnect=False,
            connect_timeout=60,
        )


@pytest.mark.parametrize(
    ("user", "subject"),
    [
        ("reward", f"{RUN}.episodes.train"),
        ("agents", f"{RUN}.events"),
        ("inference", f"{RUN}.weight_sync.offer"),
        *(("agents", f"$JS.API.STREAM.{what}.{RUN}_EVENTS") for what in MEDDLING),
        *(("agents", f"$JS.API.STREAM.{what}.{RUN}_EPISODES") for what in MEDDLING),
        ("agents", f"$JS.API.CONSUMER.DELETE.{RUN}_EPISODES.train"),
        ("agents", f"$JS.API.CONSUMER.CREATE.{RUN}_EPISODES.mine"),
        ("inference", f"$JS.API.STREAM.PURGE.KV_{RUN}_registry"),
        ("autoscaler", f"$JS.API.STREAM.DELETE.KV_{RUN}_registry"),
        ("learner", "other.weight_sync.offer"),
        ("gateway", f"{RUN}.episodes.train"),
        ("sandbox", f"{RUN}.gateway.open"),
        ("tools", f"{RUN}.scheduler.lease"),
        ("tools", "_INBOX.agents.anything"),
        *((user, "$JS.API.STREAM.CREATE.mine") for user in SERVICE_USERS if user != "scheduler"),
        *((user, "$SYS.REQ.SERVER.PING") for user in SERVICE_USERS),
        *((user, "other.inference.s.generate") for user in SERVICE_USERS),
    ],
)
async def test_publishing_on_anothers_subject_is_refused(
    guarded: Guarded, user: str, subject: str
) -> None:
    client = await guarded.connect(user)
    await client.publish(subject, b"forged")
    await flush(client)
    await asyncio.wait_for(guarded.refusal.wait(), 60)
    assert "permissions violation" in guarded.refused[0].lower()


async def test_tool_workers_serve_the_granted_names_alone(tmp_path: Path) -> None:
    guarded = _guarded(tmp_path, ClusterConfig(tool_names=("search",)))
    client = await guarded.connect("tools")
    for subject in ("tool.search", f"{RUN}.tool.search", "tool_worker.w0"):
        await client.subscribe(subject)
    await flush(client)
    assert guarded.refused == []
    await client.subscribe("tool.calculator")
    await flush(client)
    await asyncio.wait_for(guarded.refusal.wait(), 60)
    await guarded.close()


@pytest.mark.parametrize(
    ("user", "subject"),
    [
        ("reward", "_INBOX.agents.>"),
        ("tools", f"{RUN}.gateway.>"),
        ("tools", f"{RUN}.reward.score"),
        ("sandbox", "other.tool.python"),
        ("sandbox", f"{RUN}.tool.search"),
        ("sandbox", "tool.search"),
        ("tools", f"{RUN}.tool.python"),
        ("tools", "tool_worker.sandbox.s0"),  # calls of sessions
        ("tools", "tool_worker.*.s0"),
        ("sandbox", "tool_worker.w0"),
        *((user, ">") for user in SERVICE_USERS),
        *((user, "$SYS.>") for user in SERVICE_USERS),
        *((user, "_INBOX.>") for user in SERVICE_USERS),
    ],
)
async def test_listening_to_what_is_for_others_is_refused(
    guarded: Guarded, user: str, subject: str
) -> None:
    client = await guarded.connect(user)
    await client.subscribe(subject)
    await flush(client)
    await asyncio.wait_for(guarded.refusal.wait(), 60)
    assert "permissions violation" in guarded.refused[0].lower()


async def test_a_tool_worker_that_listens_to_all_workers_hears_no_call_of_a_sandbox_session(
    guarded: Guarded,
) -> None:
    curious, agents = await guarded.connect("tools"), await guarded.connect("agents")
    heard = await curious.subscribe("tool_worker.>")
    await flush(curious)
    await agents.publish("tool_worker.sandbox.s0", b"secret")
    await agents.publish("tool_worker.w0", b"for foreign workers")
    assert (await heard.next_msg(5)).data == b"for foreign workers"
    assert guarded.refused == []


async def answer_to(client: Client, subject: str) -> nats.aio.msg.Msg:
    """The answer to an empty request, asked again while the server does not know the listener yet."""
    async with asyncio.timeout(60):
        while True:
            try:
                return await client.request(subject, b"", timeout=60)
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
        ("agents", "sandbox", "tool_worker.sandbox.s0"),
        ("reward", "sandbox", "tool_worker.sandbox.s0"),
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


REFUSALS = ("NoPermissionError", "command not allowed. If the enable-")  # of the user, of the server
ADMINISTRATION = (
    "CONFIG GET *", "CONFIG SET dir /tmp", "MODULE LIST", "MODULE LOAD /tmp/x.so", "DEBUG SLEEP 0",
    "SHUTDOWN NOSAVE", "FLUSHALL", "FLUSHDB", "SAVE", "BGREWRITEAOF", "ACL LIST", "ACL SETUSER x on",
    "KEYS *", "SCAN 0", "RANDOMKEY", "DBSIZE", "SWAPDB 0 1", "SELECT 1", "REPLICAOF h 1", "MONITOR",
    "CLIENT LIST", "CLIENT KILL ID 1", "CLIENT PAUSE 1", "INFO", "SLOWLOG GET", "LATENCY DOCTOR",
    "MEMORY DOCTOR", "SCRIPT FLUSH", "SCRIPT KILL", "FUNCTION FLUSH", "EVAL return(1) 0", "WAIT 0 0",
    "SUBSCRIBE x", "PUBLISH x y", "MIGRATE 127.0.0.1 1 k 0 1", "CLUSTER INFO", "PSYNC ? -1", "COMMAND",
)  # fmt: skip
OF_OTHERS = (
    "GET {other}:model_card", "SET {other}:blob:x 1", "GET {guarded2}:blob:x", "SET anything 1",
    "DEL {guarded}:outbox {other}:outbox", "RENAME {guarded}:outbox x", "COPY {guarded}:outbox x",
    "SORT {guarded}:open BY *", "GETDEL {guarded}:blob:x", "DUMP {guarded}:blob:x", "OBJECT HELP",
    "RESTORE {guarded}:x 0 x", "MSET {guarded}:a 1 x 2", "BITOP NOT x {guarded}:a",
)  # fmt: skip
BETWEEN_SERVICES = {
    "scheduler": ("GET {guarded}:session:x", "GET {guarded}:blob:x", "SET {guarded}:model_card x",
                  "INCR {guarded}:next_version", "HGETALL {guarded}:versions"),
    "agents": ("SCRIPT LOAD return(1)", "SET {guarded}:model_card x", "GET {guarded}:session:x",
               "HSET {guarded}:versions 1 x", "SET {guarded}:next_version 1", "XDEL {guarded}:ready 1"),
    "gateway": ("SCRIPT LOAD return(1)", "SET {guarded}:model_card x", "DEL {guarded}:journal:x",
                "XADD {guarded}:outbox * s x", "SET {guarded}:counters 1", "DEL {guarded}:ready"),
    "learner": ("SCRIPT LOAD return(1)", "GET {guarded}:session:x", "DEL {guarded}:journal:x",
                "HSET {guarded}:versions 1 x", "GET {guarded}:blob:x", "DEL {guarded}:open"),
    "weight_sync": ("SCRIPT LOAD return(1)", "GET {guarded}:model_card", "DEL {guarded}:ready",
                    "GET {guarded}:blob:x", "GET {guarded}:session:x"),
    "inference": ("SET {guarded}:model_card x", "GET {guarded}:blob:x", "GET {guarded}:counters",
                  "EVALSHA 0 0"),
    "sandbox": ("GET {guarded}:model_card", "DEL {guarded}:blob:x", "EVALSHA 0 0"),
    "tools": ("GET {guarded}:model_card", "DEL {guarded}:blob:x", "EVALSHA 0 0",
              "SET {guarded}:session:x 1", "GET {guarded}:journal:x"),
    "cli": ("GET {other}:model_card", "UNLINK {other}:groups", "FLUSHALL", "EVALSHA 0 0"),
    "reward": ("GET {guarded}:model_card", "GET {guarded}:blob:x", "EVALSHA 0 0"),
    "autoscaler": ("GET {guarded}:model_card", "GET {guarded}:blob:x", "EVALSHA 0 0"),
}  # fmt: skip


@pytest.fixture(scope="module")
def redis_users(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Redis]]:
    """Clients of a Redis as a run starts it, by user."""
    folder = tmp_path_factory.mktemp("redis")
    keys = Credentials.load_or_make(folder)
    port = free_port()
    server = ServerProcess(redis_command(ClusterConfig(), folder, port, RUN, keys), port, "")
    server.start()
    yield lambda user: Redis(port=port, username=user, password=keys.redis[user])
    server.kill()


@pytest.mark.parametrize(("fsync", "on_rewrite"), [("always", "no"), ("everysec", "yes")])
def test_with_fsync_always_redis_syncs_while_it_rewrites_its_log(
    fsync: str, on_rewrite: str, tmp_path: Path
) -> None:
    config = msgspec.convert({"redis_fsync": fsync}, ClusterConfig)
    redis_command(config, tmp_path, 1, RUN, Credentials.load_or_make(tmp_path))
    lines = (tmp_path / "redis.conf").read_text().splitlines()
    assert f"no-appendfsync-on-rewrite {on_rewrite}" in lines


def _answer(client: Redis, command: str) -> str:
    try:
        return str(client.execute_command(*command.split()))
    except ResponseError as error:
        return f"{type(error).__name__}: {error}"


@pytest.mark.parametrize("user", SERVICE_USERS)
def test_redis_refuses_everything_that_is_not_a_users_own(
    user: str, redis_users: Callable[[str], Redis]
) -> None:
    with redis_users(user) as client:
        assert client.ping()
        passed = {
            command: answer
            for command in (*ADMINISTRATION, *OF_OTHERS, *BETWEEN_SERVICES[user])
            if not any(word in (answer := _answer(client, command)) for word in REFUSALS)
            and (user, command) != ("cli", "SCAN 0")  # finds what a run leaves behind; names alone
        }
    assert passed == {}


def test_redis_lets_nobody_in_without_a_password(redis_users: Callable[[str], Redis]) -> None:
    port = redis_users("cli").connection_pool.connection_kwargs["port"]
    for user, password in (("default", ""), ("default", "x"), ("agents", "guess")):
        with pytest.raises(AuthenticationError):
            Redis(port=port, username=user, password=password).ping()
    with pytest.raises(AuthenticationError):
        Redis(port=port).ping()


async def test_services_wait_for_the_scheduler_to_load_the_scripts(
    redis_users: Callable[[str], Redis],
) -> None:
    def url(user: str) -> str:
        given = redis_users(user).connection_pool.connection_kwargs
        return f"redis://{user}:{given['password']}@127.0.0.1:{given['port']}/0"

    learner, scheduler = await connect(url("learner")), await connect(url("scheduler"))
    began = asyncio.create_task(TrajectoryBuffer(learner, RUN).rebase_credit(3))
    await learner.ping()
    await Outbox(scheduler, RUN).read(1, 0.0)
    await asyncio.wait_for(began, 60)
    assert (await TrajectoryBuffer(learner, RUN).counters()).accepted_groups == 3
    await learner.aclose()
    await scheduler.aclose()


async def test_users_that_an_earlier_version_did_not_know_are_added(tmp_path: Path) -> None:
    first = Credentials.load_or_make(tmp_path)
    older = msgspec.structs.replace(
        first, nats={user: key for user, key in first.nats.items() if user != "gateway"}
    )
    one_password = {"nats": older.nats, "redis": "of all"}
    (tmp_path / "credentials.json").write_bytes(msgspec.json.encode(one_password))
    again = Credentials.load_or_make(tmp_path)
    assert again.nats.keys() == first.nats.keys()
    assert again.nats["agents"] == first.nats["agents"]
    assert again.redis.keys() == first.redis.keys()


async def test_credentials_are_made_once_and_readable_by_their_owner_only(tmp_path: Path) -> None:
    first = Credentials.load_or_make(tmp_path)
    assert Credentials.load_or_make(tmp_path) == first
    assert (tmp_path / "credentials.json").stat().st_mode & 0o777 == 0o600
    assert len({*first.nats.values(), *first.redis.values()}) == len(first.nats) + len(first.redis)
