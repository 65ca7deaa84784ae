"""Each service's users may do all of its work: the store's calls in Redis, its streams in NATS."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from nats.aio.msg import Msg

from tailrace.bus import Bus
from tailrace.bus.feed import PullFeed
from tailrace.config import Endpoints
from tailrace.store import (
    Blobs,
    Journal,
    Outbox,
    OutsideEpisodes,
    SessionLogs,
    StoreConnection,
    TrajectoryBuffer,
    Versions,
    connect,
)
from tailrace_cli.cluster.servers import (
    Credentials,
    ServerAddresses,
    connection_environment,
    nats_command,
    redis_command,
)
from tailrace_cli.config import ClusterConfig
from tailrace_protos import subjects
from tailrace_protos.episode import Outcome
from tailrace_protos.event import CheckpointSaved, RunFinished
from tailrace_protos.session import OpenSession, OutsideOffer, OutsideResult, SessionLimits
from tailrace_protos.weights import ModelCard, WeightManifest
from tests.integration.store.made import group, trajectory, turn
from tests.world.servers import ServerProcess, free_port

RUN = "lawful"
CARD = ModelCard(config_json=b"{}", tokenizer_files={})


class Users:
    """A run's servers, and connections of its users."""

    def __init__(self, folder: Path) -> None:
        keys, config = Credentials.load_or_make(folder), ClusterConfig()
        nats, redis = free_port(), free_port()
        self.servers = [
            ServerProcess(nats_command(config, folder, nats, RUN, keys), nats, ""),
            ServerProcess(redis_command(config, folder, redis, RUN, keys), redis, ""),
        ]
        self._addresses = ServerAddresses(
            f"nats://127.0.0.1:{nats}", f"redis://127.0.0.1:{redis}/0", keys.nats, keys.redis
        )
        self.stack = AsyncExitStack()

    def endpoints(self, user: str) -> Endpoints:
        return Endpoints.from_env(connection_environment(user, self._addresses))

    async def redis(self, user: str) -> StoreConnection:
        made = await connect(self.endpoints(user).redis_url)
        self.stack.push_async_callback(made.aclose)
        return made

    async def bus(self, user: str) -> Bus:
        made = await Bus.connect(self.endpoints(user), name=user, run=RUN)
        self.stack.push_async_callback(made.close)
        return made


@pytest.fixture
async def users(tmp_path: Path) -> AsyncIterator[Users]:
    made = Users(tmp_path)
    for server in made.servers:
        server.start()
    async with asyncio.timeout(60):
        yield made
        await made.stack.aclose()
    for server in made.servers:
        server.kill()


async def test_groups_go_from_the_scheduler_over_agents_to_the_learner(users: Users) -> None:
    redis = {user: await users.redis(user) for user in ("scheduler", "agents", "learner")}
    scheduler, agents, learner = (TrajectoryBuffer(one, RUN) for one in redis.values())
    events = Outbox(redis["scheduler"], RUN)
    assert await events.read(10, 0.01) == []
    await Blobs(redis["learner"], RUN).put_model_card(CARD)
    for user in ("scheduler", "agents"):
        assert await Blobs(redis[user], RUN).get_model_card() == CARD
    for index in (0, 1, 2):
        await scheduler.record_group(group(index))
    await scheduler.begin_groups({"train-0": 0})
    assert len(await scheduler.open_groups()) == 3
    assert await scheduler.raise_attempt("train-1", 0, "lost") == 1
    journal = Journal(redis["agents"], RUN)
    for index in (0, 1):
        record = group(index)
        for member in (0, 1):
            await journal.load(record.episode_id(member))
            assert await journal.append(record.episode_id(member), turn(0)) == "appended"
            assert await journal.taken_by(record.episode_id(member)) is None
            await journal.clear(record.episode_id(member))
            await agents.put_trajectory(trajectory(record, member))
    assert await scheduler.cancel_members("train-2", [0, 1], Outcome.CANCELLED, "late")
    await Outbox(redis["learner"], RUN).emit("learner", RunFinished(1, "done"), once="x", once_s=5)
    await learner.rebase_credit(0)
    first, second = await learner.next_groups(2, 1.0)
    await learner.mark_dropped([first.entry_id], "stale")
    await learner.commit_checkpoint([second.entry_id], CheckpointSaved("lineage", 1, "path", 1))
    assert await learner.next_groups(1, 0.05) == []
    assert (await learner.counters()).retained_groups == 0
    await scheduler.end_training("lineage")
    assert await learner.is_training_ended("lineage")
    await redis["agents"].command("HSET", "{lawful}:journal:train-9.0", "0", b"\xc1")
    assert await journal.load("train-9.0") == []
    await redis["learner"].command("XADD", "{lawful}:outbox", "*", "s", "learner", "b", b"\xc1")
    read = await events.read(100, 0.1)
    await events.ack([event.seq for event in read])
    await events.emit("scheduler", RunFinished(1, "done"), once="finished")
    assert len(await events.read(100, 0.1)) == 1


async def test_sessions_and_outside_episodes_of_gateway_and_agents(users: Users) -> None:
    scheduler = await users.redis("scheduler")
    await Outbox(scheduler, RUN).read(1, 0.0)  # loads the scripts
    gateway, agents = await users.redis("gateway"), await users.redis("agents")
    logs = SessionLogs(gateway, RUN)
    opening = OpenSession("train-0.0", SessionLimits(64, 64, 2e9))
    assert await logs.open(opening, "nonce", "hash", 60) == "nonce"
    assert await logs.find("hash") == "train-0.0"
    assert await logs.append("train-0.0", "nonce", "e", [b"1"], answer=("a", b"2")) == 1
    assert await logs.claim("train-0.0", "call", "me", 5) == "me"
    await logs.unclaim("train-0.0", "call", "me")
    assert (await logs.read("train-0.0")) is not None
    desk, door = OutsideEpisodes(agents, RUN), OutsideEpisodes(gateway, RUN)
    await desk.offer(OutsideOffer(opening, "train-0", 0, "train", "rows", {}, 60.0, 60.0))
    assert await door.lease("holder") is not None
    await door.bind("train-0.0", "hash")
    assert await door.id_of_key("hash") == "train-0.0"
    assert await door.renew("train-0.0")
    assert await door.settle("train-0.0", OutsideResult()) == "taken"
    assert "train-0.0" in await desk.progress(["train-0.0"])
    await desk.close("train-0.0", "ok")
    assert await door.state("train-0.0") is not None
    assert await logs.finish("train-0.0")
    await logs.set_aside("train-0.0", "nonce", ValueError("corrupted"))
    assert await logs.read("train-0.0") is None
    await logs.delete("train-0.0")


async def test_versions_cards_and_payloads(users: Users) -> None:
    await Outbox(await users.redis("scheduler"), RUN).read(1, 0.0)
    weight_sync, learner = await users.redis("weight_sync"), await users.redis("learner")
    versions = Versions(weight_sync, RUN)
    version = await versions.allocate("lineage", 0)
    await versions.record(WeightManifest(version, "lineage", 0, None, (), 0))
    await Outbox(weight_sync, RUN).emit("weight_sync", RunFinished(1, "x"), once="y", once_s=9)
    assert await Versions(learner, RUN).all() == {version: ("lineage", 0)} == await versions.all()
    assert await Versions(learner, RUN).of({version}) == {version: ("lineage", 0)}
    await Blobs(learner, RUN).put_model_card(CARD)
    for user in ("inference", "gateway", "agents"):
        assert await Blobs(await users.redis(user), RUN).get_model_card() == CARD
    for run in (RUN, "tools"):
        stored = [
            (user, await Blobs(await users.redis(user), run).put(user.encode(), 60))
            for user in ("agents", "sandbox", "tools", "cli")
        ]
        for user, ref in stored:
            for reader in ("agents", "sandbox", "tools", "cli"):
                assert await Blobs(await users.redis(reader), run).get(ref) == user.encode()


async def test_episodes_are_pulled_and_servers_are_listed(users: Users) -> None:
    scheduler, agents = await users.bus("scheduler"), await users.bus("agents")
    inference, autoscaler = await users.bus("inference"), await users.bus("autoscaler")
    await scheduler.provision_run(RUN)
    await scheduler.publish_durable(subjects.episodes(RUN, "train"), group(0).tasks[0], message_id="m")
    arrived: asyncio.Queue[Msg] = asyncio.Queue()
    nothing: Callable[[], None] = lambda: None  # noqa: E731
    stream = subjects.episodes_stream(RUN)
    feed = PullFeed(agents.connection, stream, "train", arrived.put_nowait, nothing)
    await feed.open()
    await feed.ask(1)
    await (await asyncio.wait_for(arrived.get(), 60)).ack_sync(timeout=60)
    await feed.close()
    for bus in (scheduler, inference, autoscaler):
        assert await bus.registry.all() == []
    info = await autoscaler.jetstream.consumer_info(stream, "train")
    assert info.num_pending == 0
