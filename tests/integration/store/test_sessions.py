"""Sessions, their calls, and episodes of outside agents, on a real Redis."""

from __future__ import annotations

import asyncio

from tailrace.store import (
    AppendResult,
    Journal,
    OutsideEpisodes,
    SessionLogs,
    StoreConnection,
    TrajectoryBuffer,
)
from tailrace.store.sessions import CLOSED, OutsideLease
from tailrace_protos.session import OpenSession, OutsideOffer, OutsideResult, SessionLimits
from tests.integration.store.made import group, trajectory


async def test_a_call_is_answered_by_who_claimed_it_until_it_lets_go(
    redis: StoreConnection, run_name: str
) -> None:
    logs = SessionLogs(redis, run_name)
    assert await logs.claim("s", "call", "a", 60.0) == "a"
    assert await logs.claim("s", "call", "b", 60.0) == "a"
    assert await logs.claim("s", "another call", "b", 60.0) == "b"
    await logs.unclaim("s", "call", "b")
    assert await logs.claim("s", "call", "b", 60.0) == "a"
    await logs.unclaim("s", "call", "a")
    assert await logs.claim("s", "call", "b", 60.0) == "b"


async def test_a_claim_whose_holder_died_runs_out(redis: StoreConnection, run_name: str) -> None:
    logs = SessionLogs(redis, run_name)
    assert await logs.claim("s", "call", "dead", 0.05) == "dead"
    async with asyncio.timeout(60):
        while await logs.claim("s", "call", "alive", 60.0) != "alive":
            await asyncio.sleep(0.01)


OPENING = OpenSession("train-0.0", SessionLimits(64, 64, 2e9))


async def test_a_session_that_is_opened_again_keeps_its_log_as_long_as_itself(
    redis: StoreConnection, run_name: str
) -> None:
    logs = SessionLogs(redis, run_name)
    await logs.open(OPENING, "nonce", "key", 60)
    assert await logs.append("train-0.0", "nonce", "call", [b"1"]) == 1
    assert await logs.open(OPENING, "another", "key", 5000) == "nonce"
    kept_s = await redis.command("TTL", f"{{{run_name}}}:session_log:train-0.0")
    assert isinstance(kept_s, int)
    assert kept_s > 4000


async def test_only_the_key_of_a_session_finishes_it(redis: StoreConnection, run_name: str) -> None:
    logs = SessionLogs(redis, run_name)
    await logs.open(OPENING, "nonce", "key", 60)
    assert not await logs.finish("train-0.0", "key of an earlier session")
    assert await logs.append("train-0.0", "nonce", "call", [b"1"]) == 1
    assert await logs.finish("train-0.0", "key")
    assert await logs.append("train-0.0", "nonce", "another call", [b"1"]) == CLOSED
    assert await logs.finish("train-0.0")
    assert not await logs.finish("train-1.0")


async def test_the_first_of_two_writers_of_a_journal_learns_of_the_second(
    redis: StoreConnection, run_name: str
) -> None:
    first, second = Journal(redis, run_name), Journal(redis, run_name)
    assert await first.taken_by("train-0.0") is None
    await second.load("train-0.0")
    taken = await first.taken_by("train-0.0"), await second.taken_by("train-0.0")
    assert taken == (AppendResult.FENCED, None)


# Outside episodes

AT_ONCE_S = 1e-6


def offer(index: int, lease_s: float = 60.0) -> OutsideOffer:
    opening = OpenSession(f"train-{index}.0", SessionLimits(64, 64, 2e9))
    return OutsideOffer(opening, f"train-{index}", 0, "train", "rows", {}, lease_s, 60.0)


def leased_id(leased: OutsideLease | None) -> str:
    assert leased is not None
    return leased.offer.opening.episode_id


async def test_what_an_earlier_holder_sends_counts_no_more_once_another_has_the_episode(
    redis: StoreConnection, run_name: str
) -> None:
    episodes = OutsideEpisodes(redis, run_name)
    await episodes.offer(offer(0, AT_ONCE_S))
    await episodes.lease("a")
    await episodes.bind("train-0.0", "key of a")
    assert leased_id(await episodes.lease("b")) == "train-0.0"
    assert await episodes.id_of_key("key of a") == ""
    late = OutsideResult(rewards={"": 9.0})
    assert await episodes.settle("train-0.0", late, "key of a") == "lost"
    await episodes.bind("train-0.0", "key of b")
    assert await episodes.settle("train-0.0", late, "key of a") == "lost"
    assert await episodes.settle("train-0.0", OutsideResult(), "key of b") == "taken"
    assert await episodes.settle("train-0.0", OutsideResult(), "key of b") == "same"


async def test_a_holder_is_forgotten_with_its_episode_but_not_with_an_earlier_one(
    redis: StoreConnection, run_name: str
) -> None:
    episodes = OutsideEpisodes(redis, run_name)
    for index in (0, 1):
        await episodes.offer(offer(index))
    assert leased_id(await episodes.lease("a")) == "train-0.0"
    await episodes.settle("train-0.0", OutsideResult())
    assert leased_id(await episodes.lease("a")) == "train-1.0"
    await episodes.close("train-0.0", "ok")
    again = await episodes.lease("a")
    assert (leased_id(again), again and again.is_resumed) == ("train-1.0", True)
    await episodes.close("train-1.0", "ok")
    assert await redis.command("EXISTS", f"{{{run_name}}}:outside_of:a") == 0


async def test_an_episode_that_is_over_and_settled_is_not_offered_again(
    redis: StoreConnection, buffer: TrajectoryBuffer, run_name: str
) -> None:
    episodes, record = OutsideEpisodes(redis, run_name), group(0)
    await buffer.record_group(record)
    await episodes.offer(offer(0))
    await episodes.lease("a")
    await episodes.settle("train-0.0", OutsideResult())
    await buffer.put_trajectory(trajectory(record, 0))
    await episodes.close("train-0.0", "ok")
    assert await episodes.offer(offer(0)) == "over"
    assert await episodes.lease("b") is None
    await episodes.close("train-0.0", "timeout")
    assert await episodes.state("train-0.0") == ("over", "ok")


async def test_an_episode_is_given_up_unless_its_agent_has_ended_it(
    redis: StoreConnection, run_name: str
) -> None:
    episodes, ended = OutsideEpisodes(redis, run_name), OutsideResult(rewards={"": 0.5})
    for index in (0, 1):
        await episodes.offer(offer(index))
        await episodes.lease(f"agent {index}")
    assert await episodes.settle("train-0.0", ended) == "taken"
    assert await episodes.give_up("train-0.0", "timeout") == ended
    assert await episodes.state("train-0.0") == ("rewarded", "")
    assert await episodes.give_up("train-1.0", "timeout") is None
    assert await episodes.state("train-1.0") == ("over", "timeout")
    assert await episodes.settle("train-1.0", ended) == "over"


async def test_one_worker_looks_after_more_episodes_than_lua_takes_arguments(
    redis: StoreConnection, run_name: str
) -> None:
    names = [f"train-{index}.0" for index in range(9000)]
    assert list(await OutsideEpisodes(redis, run_name).progress(names)) == names


async def test_a_renewal_tells_the_length_of_the_lease(redis: StoreConnection, run_name: str) -> None:
    episodes = OutsideEpisodes(redis, run_name)
    assert await episodes.renew("train-0.0") is None
    await episodes.offer(offer(0, 2.5))
    assert await episodes.renew("train-0.0") == 0
    await episodes.lease("a")
    assert await episodes.renew("train-0.0") == 2.5
