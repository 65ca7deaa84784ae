"""Whatever order writers, duplicates, cancels and checkpoints come in, the accounts balance."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Awaitable, Callable

import pytest

from tailrace.store import GroupRecord, Outbox, PutResult, StoreConnection, TrajectoryBuffer, connect
from tailrace_protos.episode import Outcome
from tailrace_protos.event import CheckpointSaved, EpisodeSettled, GroupClosed, GroupDropped
from tests.integration.store.made import group, trajectory
from tests.world.servers import ServerProcess

OUTCOMES = [*[Outcome.OK] * 5, Outcome.POLICY_FAILURE, Outcome.INFRA_FAILURE, Outcome.TIMEOUT]


class Play:
    """One random history of a run, by several clients of one Redis."""

    def __init__(self, clients: list[StoreConnection], run: str, seed: int) -> None:
        self.rng = random.Random(seed)
        self.run = run
        self.clients = clients
        self.records = [self._record(index) for index in range(self.rng.randint(5, 25))]
        self.settlements: Counter[str] = Counter()
        self.trained: list[str] = []
        self.dropped: list[str] = []
        self.num_commits = 0

    def _record(self, index: int) -> GroupRecord:
        phase = self.rng.choice(["train", "train", "train", "eval"])
        return group(
            index,
            members=self.rng.randint(1, 5),
            min_valid=self.rng.randint(1, 3),
            phase="eval" if phase == "eval" else "train",
        )

    def buffer(self) -> TrajectoryBuffer:
        return TrajectoryBuffer(self.rng.choice(self.clients), self.run)

    async def play(self) -> None:
        await asyncio.gather(*(self.buffer().record_group(r) for r in self.records for _ in range(2)))
        steps = [
            self._writer(r, m) for r in self.records for m in range(len(r.tasks)) for _ in range(2)
        ]
        steps += [self._canceller(record) for record in self.rng.sample(self.records, 4)]
        self.rng.shuffle(steps)
        await asyncio.gather(self._learn(), *(step() for step in steps))
        await self._learn()

    def _writer(self, record: GroupRecord, member: int) -> Callable[[], Awaitable[None]]:
        outcome, num_tokens = self.rng.choice(OUTCOMES), self.rng.randint(2, 400)
        buffer, delay = self.buffer(), self.rng.randint(0, 30)

        async def write() -> None:
            for _ in range(delay):
                await asyncio.sleep(0)
            item = trajectory(record, member, outcome=outcome, num_tokens=num_tokens)
            result = await buffer.put_trajectory(item)
            assert result is not PutResult.UNKNOWN_GROUP
            self.settlements[item.episode_id] += result is PutResult.SETTLED

        return write

    def _canceller(self, record: GroupRecord) -> Callable[[], Awaitable[None]]:
        buffer, members = self.buffer(), list(range(len(record.tasks)))

        async def cancel() -> None:
            assert await buffer.cancel_members(record.group_id, members, Outcome.TIMEOUT, "deadline")

        return cancel

    async def _learn(self) -> None:
        """A learner that sometimes crashes and begins again from its last commit."""
        buffer = self.buffer()
        held: list[tuple[str, str]] = []
        for _ in range(30):
            taken = await buffer.next_groups(self.rng.randint(1, 4), 0.0)
            for entry_id, _, taken_group in taken:
                if self.rng.random() < 0.2:
                    await buffer.mark_dropped([entry_id], "stale")
                    self.dropped.append(taken_group.group_id)
                else:
                    held.append((entry_id, taken_group.group_id))
            if self.rng.random() < 0.2:
                buffer, held = self.buffer(), []
            elif self.rng.random() < 0.4:
                await self._commit(buffer, held)
                held = []
        await self._commit(buffer, held)

    async def _commit(self, buffer: TrajectoryBuffer, held: list[tuple[str, str]]) -> None:
        self.num_commits += 1
        event = CheckpointSaved("a", self.num_commits, "path", len(held))
        for _ in range(self.rng.randint(1, 2)):
            await buffer.commit_checkpoint([entry_id for entry_id, _ in held], event)
        self.trained += [group_id for _, group_id in held]


async def check(play: Play, redis: StoreConnection) -> None:
    """Every member settled once, every group closed once, every sent group trained or dropped once."""
    bodies = [event.body for event in await Outbox(redis, play.run).read(100_000, 0)]
    settled = Counter(body.episode_id for body in bodies if isinstance(body, EpisodeSettled))
    assert settled == Counter(r.episode_id(m) for r in play.records for m in range(len(r.tasks)))
    assert max(play.settlements.values()) == 1
    closed = [body for body in bodies if isinstance(body, GroupClosed)]
    assert Counter(c.group_id for c in closed) == Counter(record.group_id for record in play.records)
    for body in closed:
        record = next(r for r in play.records if r.group_id == body.group_id)
        enough = body.num_valid >= record.min_valid and record.phase == "train"
        assert body.sent_to_learner == enough
    sent = [body.group_id for body in closed if body.sent_to_learner]
    assert Counter(play.trained + play.dropped) == Counter(sent)
    dropped_events = [body.group_id for body in bodies if isinstance(body, GroupDropped)]
    assert Counter(dropped_events) == Counter(play.dropped)

    buffer = TrajectoryBuffer(redis, play.run)
    assert await buffer.open_groups() == []
    counters = await buffer.counters()
    assert counters.accepted_groups == len(sent) - len(play.dropped)
    assert (counters.unconsumed_groups, counters.unconsumed_bytes) == (0, 0)
    assert (counters.retained_groups, counters.retained_bytes) == (0, 0)
    left = await redis.command("KEYS", f"{{{play.run}}}:data:*")
    assert left == []


@pytest.mark.parametrize("seed", range(8))
async def test_every_member_settles_once_and_every_group_closes_once(
    redis_server: ServerProcess, run_name: str, seed: int
) -> None:
    clients = [await connect(redis_server.url) for _ in range(3)]
    play = Play(clients, run_name, seed)
    await play.play()
    await check(play, clients[0])
    for client in clients:
        await client.aclose()


async def test_the_accounts_balance_although_redis_is_killed_again_and_again(
    own_redis_server: ServerProcess, run_name: str
) -> None:
    clients = [await connect(own_redis_server.url) for _ in range(3)]
    play = Play(clients, run_name, seed=99)
    playing = asyncio.create_task(play.play())
    for _ in range(3):
        reached = clients[0].pipeline.num_commands + 20
        while clients[0].pipeline.num_commands < reached and not playing.done():
            await asyncio.sleep(0)
        own_redis_server.kill()
        await asyncio.to_thread(own_redis_server.start)
    await playing
    await check(play, clients[0])
    for client in clients:
        await client.aclose()


async def test_counters_equal_what_the_stream_holds(
    redis: StoreConnection, buffer: TrajectoryBuffer, run_name: str
) -> None:
    records = [group(index, members=1, min_valid=1) for index in range(6)]
    for index, record in enumerate(records):
        await buffer.record_group(record)
        await buffer.put_trajectory(trajectory(record, 0, num_tokens=10 * (index + 1)))
    taken = await buffer.next_groups(4, 0)
    await buffer.mark_dropped([taken[1].entry_id], "stale")
    counters = await buffer.counters()
    retained = [ready for position, ready in enumerate(taken) if position != 1]
    assert counters.retained_bytes == sum(ready.num_bytes for ready in retained)
    assert counters.retained_groups == 3
    waiting = await buffer.next_groups(10, 0)
    assert counters.unconsumed_groups == len(waiting) == 2
    assert counters.unconsumed_bytes == sum(ready.num_bytes for ready in waiting)
