"""Scores over real NATS, and a journal in real Redis."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from tailrace.bus import Bus, CallFailedError
from tailrace.policy.activity import Stages
from tailrace.store import Journal, connect
from tailrace_agents.adapters.scoring import RewardClient
from tailrace_agents.handlers import StoredJournal
from tailrace_agents.ports import EpisodeTakenError
from tailrace_protos import subjects
from tailrace_protos.base import EMPTY
from tailrace_protos.chat import ChatMessage
from tailrace_protos.episode import EnvTask
from tailrace_protos.generation import CallErrorCode, FinishReason
from tailrace_protos.journal import CallRecord, EnvStep
from tailrace_protos.reward import Score, ScoreItem, ScoreReply, ScoreRequest
from tailrace_protos.session import LedgerNode
from tests.world.servers import ServerProcess
from tests.world.serving import make_service, serving


def item(number: int, text: str = "") -> ScoreItem:
    messages = (ChatMessage("user", text),)
    return ScoreItem(f"g{number}.0", EnvTask("lake", number), messages, (float(number),), {})


class Scores:
    """A reward worker that answers as told."""

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.error: CallFailedError | None = None

    async def score(self, request: ScoreRequest) -> ScoreReply:
        self.sizes.append(len(request.items))
        if self.error is not None:
            raise self.error
        return ScoreReply(
            tuple(Score(item.episode_id, sum(item.turn_rewards)) for item in request.items)
        )


async def test_scores_of_one_moment_share_a_request(
    nats_server: ServerProcess, run_name: str, bus: Bus
) -> None:
    scores, service = Scores(), make_service(nats_server.url, run_name, "reward")
    service.endpoint(subjects.score(run_name), ScoreRequest, scores.score)
    async with serving(service):
        client = RewardClient(bus, run_name, timeout_s=60)
        found = await asyncio.gather(*(client.score(item(n)) for n in range(100)))
        assert [score.reward for score in found] == [float(n) for n in range(100)]
        assert scores.sizes == [100]
        long = "x" * 400_000
        await asyncio.gather(*(client.score(item(n, long)) for n in range(3)))
        assert scores.sizes == [100, 1, 1, 1]


async def test_scoring_waits_for_a_reward_worker_that_comes_later(
    nats_server: ServerProcess, run_name: str, bus: Bus
) -> None:
    waiting = asyncio.create_task(RewardClient(bus, run_name, timeout_s=60).score(item(3)))
    await asyncio.sleep(0.05)
    service = make_service(nats_server.url, run_name, "reward")
    service.endpoint(subjects.score(run_name), ScoreRequest, Scores().score)
    async with serving(service):
        assert (await waiting).reward == 3.0


@pytest.mark.parametrize("code", [CallErrorCode.INVALID, CallErrorCode.INTERNAL])
async def test_a_worker_that_refuses_for_good_gives_an_error_and_no_reward(
    nats_server: ServerProcess, run_name: str, bus: Bus, code: CallErrorCode
) -> None:
    scores, service = Scores(), make_service(nats_server.url, run_name, "reward")
    scores.error = CallFailedError(code, "cannot")
    service.endpoint(subjects.score(run_name), ScoreRequest, scores.score)
    async with serving(service):
        score = await RewardClient(bus, run_name, timeout_s=60).score(item(1))
    assert score.error is not None
    assert score.error.code is code


async def test_an_episode_too_long_for_a_message_is_an_error_of_its_own(
    nats_server: ServerProcess, run_name: str, bus: Bus
) -> None:
    service = make_service(nats_server.url, run_name, "reward")
    service.endpoint(subjects.score(run_name), ScoreRequest, Scores().score)
    async with serving(service):
        client = RewardClient(bus, run_name, timeout_s=60)
        huge, small = await asyncio.gather(
            client.score(item(1, "x" * 2_000_000)), client.score(item(2))
        )
    assert huge.error is not None
    assert "max_payload" in huge.error.reason
    assert small.reward == 2.0


async def test_rows_that_are_too_large_together_are_scored_apart(
    nats_server: ServerProcess, run_name: str, bus: Bus
) -> None:
    scores, service = Scores(), make_service(nats_server.url, run_name, "reward")
    service.endpoint(subjects.score(run_name), ScoreRequest, scores.score)

    def with_row(number: int, size: int) -> ScoreItem:
        tested = msgspec.structs.replace(item(number).task, row={"tests": "x" * size})
        return msgspec.structs.replace(item(number), task=tested)

    async with serving(service):
        client = RewardClient(bus, run_name, timeout_s=60)
        sizes = [400_000, 400_000, 400_000, 2_000_000, 0]
        found = await asyncio.gather(*(client.score(with_row(n, s)) for n, s in enumerate(sizes)))
    assert [score.reward for score in found if score.error is None] == [0.0, 1.0, 2.0, 4.0]
    assert found[3].error is not None


def record(turn: int, reply: str = "Left") -> CallRecord:
    said = ChatMessage("assistant", reply)
    node = LedgerNode(str(turn), "", (), EMPTY, EMPTY, EMPTY, (), FinishReason.STOP, said)
    return CallRecord(turn, node, step=EnvStep(0.0, False, False))


async def test_a_journal_passes_to_who_loads_it_and_can_be_begun_anew(
    redis_server: ServerProcess, run_name: str
) -> None:
    redis = await connect(redis_server.url)
    try:
        first = StoredJournal(Journal(redis, run_name), "g0.0", Stages(), may_have_records=False)
        assert list(await first.load()) == []
        for turn in range(2):
            await first.append(record(turn))
        second = StoredJournal(Journal(redis, run_name), "g0.0", Stages(), may_have_records=True)
        assert [one.index for one in await second.load()] == [0, 1]
        with pytest.raises(EpisodeTakenError, match="fenced"):
            await first.append(record(2))
        await first.clear()  # no longer its own
        await second.append(record(2))
        third = StoredJournal(Journal(redis, run_name), "g0.0", Stages(), may_have_records=True)
        assert [one.index for one in await third.load()] == [0, 1, 2]
        await third.clear()
        await third.append(record(0, reply="Right"))
        (kept,) = await third.load()
        assert isinstance(kept, CallRecord)
        assert kept.node.reply.content == "Right"
    finally:
        await redis.aclose()


class OldTurn(msgspec.Struct, tag="turn_record"):
    """Record of a turn as an older Tailrace wrote it."""

    index: int
    reply: str = "Left"


async def test_a_journal_of_an_older_tailrace_is_deleted_and_named(
    redis_server: ServerProcess, run_name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    redis = await connect(redis_server.url)
    try:
        old = Journal(redis, run_name)
        for turn in range(2):
            await old.append("g0.0", OldTurn(turn))  # type: ignore[arg-type]
        journal = StoredJournal(Journal(redis, run_name), "g0.0", Stages(), may_have_records=True)
        assert list(await journal.load()) == []
        assert "turn_record" in "".join(capsys.readouterr())
        await journal.append(record(0))
        assert [one.index for one in await journal.load()] == [0]
    finally:
        await redis.aclose()
