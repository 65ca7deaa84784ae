"""The trajectory buffer on a real Redis: settlement, closing, consumption, accounts."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from tailrace.store import (
    BufferCounters,
    Outbox,
    PutResult,
    ReadyGroup,
    StoreConnection,
    TrajectoryBuffer,
)
from tailrace_protos.base import as_int32
from tailrace_protos.episode import Outcome
from tailrace_protos.event import (
    CheckpointSaved,
    EpisodeRedelivered,
    EpisodeSettled,
    GroupAdmitted,
    GroupClosed,
    GroupDropped,
)
from tests.integration.store.made import group, trajectory


async def close_group(buffer: TrajectoryBuffer, index: int, members: int = 2) -> None:
    await buffer.record_group(group(index, members=members))
    await settle(buffer, index, members)


async def settle(buffer: TrajectoryBuffer, index: int, members: int = 2) -> None:
    record = group(index, members=members)
    for member in range(members):
        await buffer.put_trajectory(trajectory(record, member))


async def bodies(outbox: Outbox) -> list[object]:
    return [event.body for event in await outbox.read(1000, 0)]


async def test_the_last_member_to_settle_sends_the_group_to_the_learner(
    buffer: TrajectoryBuffer,
) -> None:
    record = group(0, members=2)
    await buffer.record_group(record)
    assert await buffer.put_trajectory(trajectory(record, 1)) is PutResult.SETTLED
    assert await buffer.next_groups(1, 0) == []

    assert await buffer.put_trajectory(trajectory(record, 0)) is PutResult.SETTLED
    (ready,) = await buffer.next_groups(4, 0)
    assert ready.group.group_id == record.group_id
    assert ready.group.group_index == 0
    assert [member.member for member in ready.group.members] == [0, 1]
    assert ready.group.members[1] == trajectory(record, 1)


async def test_the_first_writer_of_a_member_wins(buffer: TrajectoryBuffer) -> None:
    record = group(0, members=1, min_valid=1)
    await buffer.record_group(record)
    answers = await asyncio.gather(
        *(buffer.put_trajectory(trajectory(record, 0, num_tokens=6 + i, attempt=i)) for i in range(5))
    )
    assert answers.count(PutResult.SETTLED) == 1
    assert answers.count(PutResult.ALREADY_SETTLED) == 4
    (ready,) = await buffer.next_groups(4, 0)
    winner = answers.index(PutResult.SETTLED)
    assert ready.group.members[0].attempt == winner
    assert len(as_int32(ready.group.members[0].rows[0].token_ids)) == 6 + winner


async def test_a_trajectory_of_a_group_that_was_never_recorded_is_refused(
    buffer: TrajectoryBuffer,
) -> None:
    assert await buffer.put_trajectory(trajectory(group(9), 0)) is PutResult.UNKNOWN_GROUP


async def test_a_member_beyond_the_group_does_not_settle_anything(buffer: TrajectoryBuffer) -> None:
    await buffer.record_group(group(0, members=2))
    stray = trajectory(group(0, members=5), 4)
    assert await buffer.put_trajectory(stray) is PutResult.ALREADY_SETTLED
    (record,) = await buffer.open_groups()
    assert record.settled == {}


async def test_recording_a_closed_group_again_does_not_open_it(buffer: TrajectoryBuffer) -> None:
    await close_group(buffer, 0)
    await buffer.record_group(group(0))
    assert await buffer.open_groups() == []
    assert await buffer.put_trajectory(trajectory(group(0), 0)) is PutResult.ALREADY_SETTLED


async def test_a_group_with_too_few_valid_members_is_discarded(
    buffer: TrajectoryBuffer, outbox: Outbox, redis: StoreConnection, run_name: str
) -> None:
    record = group(0, members=3, min_valid=2)
    await buffer.record_group(record)
    await buffer.put_trajectory(trajectory(record, 0))
    await buffer.put_trajectory(trajectory(record, 1, outcome=Outcome.INFRA_FAILURE))
    assert await buffer.cancel_members(record.group_id, [0, 1, 2], Outcome.TIMEOUT, "deadline")
    assert await buffer.next_groups(1, 0) == []
    closed = [body for body in await bodies(outbox) if isinstance(body, GroupClosed)]
    assert [(c.num_valid, c.num_members, c.sent_to_learner) for c in closed] == [(1, 3, False)]
    assert await redis.command("EXISTS", f"{{{run_name}}}:data:{record.group_id}") == 0


async def test_policy_failures_count_as_valid_members(buffer: TrajectoryBuffer) -> None:
    record = group(0, members=2, min_valid=2)
    await buffer.record_group(record)
    await buffer.put_trajectory(trajectory(record, 0, outcome=Outcome.POLICY_FAILURE))
    await buffer.put_trajectory(trajectory(record, 1))
    assert len(await buffer.next_groups(1, 0)) == 1


async def test_cancelled_members_stand_in_the_group_with_empty_arrays(buffer: TrajectoryBuffer) -> None:
    record = group(0, members=3, min_valid=2)
    await buffer.record_group(record)
    for member in (0, 2):
        await buffer.put_trajectory(trajectory(record, member))
    assert await buffer.cancel_members(record.group_id, [1], Outcome.CANCELLED, "straggler")
    (ready,) = await buffer.next_groups(1, 0)
    cancelled = ready.group.members[1]
    assert (cancelled.outcome, cancelled.reason) == (Outcome.CANCELLED, "straggler")
    assert cancelled.rows == ()


async def test_cancelling_does_not_touch_settled_members(
    buffer: TrajectoryBuffer, outbox: Outbox
) -> None:
    record = group(0, members=2)
    await buffer.record_group(record)
    await buffer.put_trajectory(trajectory(record, 0))
    assert not await buffer.cancel_members(record.group_id, [0], Outcome.TIMEOUT, "late")
    settled = [body for body in await bodies(outbox) if isinstance(body, EpisodeSettled)]
    assert [s.outcome for s in settled] == [Outcome.OK]


async def test_evaluation_groups_never_reach_the_learner_and_keep_no_payload(
    buffer: TrajectoryBuffer, outbox: Outbox, redis: StoreConnection, run_name: str
) -> None:
    record = group(0, members=2, min_valid=1, phase="eval")
    await buffer.record_group(record)
    await buffer.put_trajectory(trajectory(record, 0))
    assert await redis.command("EXISTS", f"{{{run_name}}}:data:{record.group_id}") == 0
    await buffer.put_trajectory(trajectory(record, 1))
    assert await buffer.next_groups(1, 0) == []
    assert await buffer.counters() == BufferCounters()
    closed = [body for body in await bodies(outbox) if isinstance(body, GroupClosed)]
    assert closed == [GroupClosed(record.group_id, "eval", 2, 2, False, 0)]


async def test_every_state_change_leaves_its_event(buffer: TrajectoryBuffer, outbox: Outbox) -> None:
    record = group(3, members=1, min_valid=1)
    await buffer.record_group(record)
    assert await buffer.raise_attempt(record.group_id, 0, "server lost") == 1
    await buffer.put_trajectory(trajectory(record, 0, attempt=1))
    (ready,) = await buffer.next_groups(1, 0)
    await buffer.mark_dropped([ready.entry_id], "stale")
    assert await bodies(outbox) == [
        GroupAdmitted("train-3", 3, "train", 1, 0),
        EpisodeRedelivered("train-3.0", 1, "server lost"),
        EpisodeSettled(
            *("train-3.0", "train-3", 0, "train", Outcome.OK, "", 1.5, 1.0, 4, 1, 3, 4, 10.0, 12.0),
            context_tokens=6,
            reports_success=True,
        ),
        GroupClosed("train-3", "train", 1, 1, True, ready.num_bytes),
        GroupDropped("train-3", "stale"),
    ]


async def test_a_restarted_scheduler_finds_open_groups_with_their_progress(
    buffer: TrajectoryBuffer, redis: StoreConnection, run_name: str
) -> None:
    await close_group(buffer, 0)
    record = group(1, members=3)
    await buffer.record_group(record)
    await buffer.raise_attempt(record.group_id, 2, "lost")
    await buffer.raise_attempt(record.group_id, 2, "lost again")
    await buffer.put_trajectory(trajectory(record, 1))

    (found,) = await TrajectoryBuffer(redis, run_name).open_groups()
    assert found.tasks == record.tasks
    assert found.deadline_unix_s == record.deadline_unix_s
    assert found.attempts == (0, 0, 2)
    assert found.settled == {1: Outcome.OK}
    assert (await buffer.counters()).next_group_index == 2


async def test_a_settled_member_gets_no_further_attempt(buffer: TrajectoryBuffer) -> None:
    record = group(0)
    await buffer.record_group(record)
    await buffer.put_trajectory(trajectory(record, 0))
    assert await buffer.raise_attempt(record.group_id, 0, "late") is None
    assert await buffer.raise_attempt("train-77", 0, "late") is None


async def test_a_restarted_learner_reads_its_uncommitted_groups_first_and_in_order(
    buffer: TrajectoryBuffer, redis: StoreConnection, run_name: str
) -> None:
    for index in range(5):
        await close_group(buffer, index)
    first = await buffer.next_groups(3, 0)
    await buffer.commit_checkpoint([first[0].entry_id], CheckpointSaved("a", 1, "step_1", 1))

    again = TrajectoryBuffer(redis, run_name)
    replayed = await again.next_groups(10, 0)
    assert [ready.group.group_index for ready in replayed] == [1, 2, 3, 4]
    assert replayed[0] == first[1]
    assert await again.next_groups(10, 0) == []


async def test_a_checkpoint_committed_twice_counts_once(
    buffer: TrajectoryBuffer, outbox: Outbox
) -> None:
    for index in range(3):
        await close_group(buffer, index)
    taken = await buffer.next_groups(2, 0)
    event = CheckpointSaved("a", 1, "step_1", 2)
    for _ in range(2):
        await buffer.commit_checkpoint([ready.entry_id for ready in taken], event)
    assert [body for body in await bodies(outbox) if isinstance(body, CheckpointSaved)] == [event]
    counters = await buffer.counters()
    assert (counters.retained_groups, counters.retained_bytes) == (0, 0)
    assert (counters.unconsumed_groups, counters.accepted_groups) == (1, 3)
    buffer.rewind()
    assert [ready.group.group_index for ready in await buffer.next_groups(9, 0)] == [2]


async def test_accounts_follow_a_group_from_closing_to_its_checkpoint(buffer: TrajectoryBuffer) -> None:
    await close_group(buffer, 0)
    await close_group(buffer, 1)
    waiting = await buffer.counters()
    assert (waiting.unconsumed_groups, waiting.retained_groups, waiting.accepted_groups) == (2, 0, 2)
    taken = await buffer.next_groups(1, 0)
    held = await buffer.counters()
    assert held.retained_bytes == taken[0].num_bytes
    assert held.unconsumed_bytes == waiting.unconsumed_bytes - taken[0].num_bytes
    await buffer.mark_dropped([taken[0].entry_id], "stale")
    assert (await buffer.counters()).accepted_groups == 1


async def test_a_resumed_lineage_counts_its_own_groups(buffer: TrajectoryBuffer) -> None:
    for index in range(3):
        await close_group(buffer, index)
    taken = await buffer.next_groups(2, 0)
    await buffer.commit_checkpoint([ready.entry_id for ready in taken], CheckpointSaved("a", 9, "x", 2))
    await buffer.rebase_credit(10)
    assert (await buffer.counters()).accepted_groups == 11


async def test_next_groups_wakes_up_as_soon_as_a_group_closes(buffer: TrajectoryBuffer) -> None:
    waiting = asyncio.create_task(buffer.next_groups(1, 30.0))
    await close_group(buffer, 0)
    async with asyncio.timeout(60):
        assert len(await waiting) == 1


@pytest.mark.parametrize("block_s", [0.0, 0.02])
async def test_next_groups_returns_empty_when_nothing_closes(
    buffer: TrajectoryBuffer, block_s: float
) -> None:
    assert await buffer.next_groups(1, block_s) == []


def indices(taken: Sequence[ReadyGroup]) -> list[int]:
    return [ready.group.group_index for ready in taken]


async def test_the_oldest_group_comes_first_whatever_closed_first(buffer: TrajectoryBuffer) -> None:
    for index in (3, 1, 2):
        await close_group(buffer, index)
    assert indices(await buffer.next_groups(2, 0)) == [1, 2]
    await close_group(buffer, 0)
    assert indices(await buffer.next_groups(2, 0)) == [0, 3]


async def test_a_step_keeps_a_place_for_each_open_group_that_no_later_step_may_train(
    buffer: TrajectoryBuffer,
) -> None:
    await buffer.record_group(group(0))
    await buffer.begin_groups({"train-0": 4})
    for index in (1, 2, 3):
        await close_group(buffer, index)
        await buffer.begin_groups({f"train-{index}": 5})  # too late: closed
    for index in (4, 5, 6):
        await buffer.record_group(group(index))
        await buffer.begin_groups({f"train-{index}": 6})
        await settle(buffer, index)
    young = await buffer.next_groups(3, 0, old_step=4)
    assert indices(young) == [1, 2, 3], "closed at step 0 of their record: old themselves"
    assert indices(await buffer.next_groups(2, 0, old_step=4)) == [4]
    assert await buffer.next_groups(1, 0, old_step=4) == [], "the last place is kept"
    waiting = asyncio.create_task(buffer.next_groups(1, 30.0, old_step=4))
    await settle(buffer, 0)
    async with asyncio.timeout(60):
        assert indices(await waiting) == [0]
    assert indices(await buffer.next_groups(9, 0, old_step=5)) == [5, 6]


async def test_the_buffer_tells_the_places_that_a_waiting_step_keeps(buffer: TrajectoryBuffer) -> None:
    await buffer.record_group(group(0))
    await buffer.begin_groups({"train-0": 3})
    assert [record.begun_step for record in await buffer.open_groups()] == [3]
    await close_group(buffer, 1)
    await buffer.next_groups(2, 0)
    assert (await buffer.counters()).places_kept == 0, "it keeps none: no step was told"
    assert await buffer.next_groups(2, 0, old_step=3) == []
    assert (await buffer.counters()).places_kept == 2
    await settle(buffer, 0)
    assert indices(await buffer.next_groups(1, 0, old_step=3)) == [0]
    assert (await buffer.counters()).places_kept == 0


async def test_the_end_of_training_is_told_to_one_lineage(buffer: TrajectoryBuffer) -> None:
    assert not await buffer.is_training_ended("0-a")
    await buffer.end_training("0-a")
    await buffer.end_training("0-a")
    assert await buffer.is_training_ended("0-a")
    assert not await buffer.is_training_ended("3-b")


async def test_a_deferred_group_holds_up_nothing(buffer: TrajectoryBuffer) -> None:
    await buffer.record_group(group(0))
    await buffer.begin_groups({"train-0": 1})
    await buffer.begin_groups({"train-0": 9})  # a repeated note
    await buffer.record_group(group(1))
    await buffer.begin_groups({"train-1": 2})
    await settle(buffer, 1)
    assert await buffer.next_groups(1, 0, old_step=1) == []
    waiting = asyncio.create_task(buffer.next_groups(1, 30.0, old_step=1))
    await buffer.begin_groups({"train-0": 2}, defer=True)
    async with asyncio.timeout(60):
        assert indices(await waiting) == [1]


async def test_groups_come_again_in_the_order_in_which_they_were_taken(
    buffer: TrajectoryBuffer, redis: StoreConnection, run_name: str
) -> None:
    for index in (2, 0):
        await close_group(buffer, index)
    taken = await buffer.next_groups(2, 0)
    await close_group(buffer, 1)
    taken += await buffer.next_groups(2, 0)
    again = TrajectoryBuffer(redis, run_name)
    assert await again.next_groups(2, 0) == taken[:2]
    assert await again.next_groups(2, 0) == taken[2:]
    assert indices(taken) == [0, 2, 1]


async def test_two_runs_in_one_redis_do_not_meet(redis: StoreConnection, run_name: str) -> None:
    ours, theirs = TrajectoryBuffer(redis, run_name), TrajectoryBuffer(redis, f"{run_name}-b")
    await close_group(ours, 0)
    assert await theirs.next_groups(1, 0) == []
    assert (await theirs.counters()).accepted_groups == 0
