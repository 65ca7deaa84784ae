"""Episodes of workflows: sessions, rows, rewards, typed ends."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
from msgspec.structs import replace

from tailrace.clock import SystemClock
from tailrace.policy.activity import Stages
from tailrace.sdk.workflow import WorkflowEnd
from tailrace_agents.core.episode import EpisodeHandedBackError, EpisodeResult, mix_seed
from tailrace_agents.core.machine import PhaseArgs, PlayContext
from tailrace_agents.core.workflow_player import (
    RunnerFailedError,
    SessionFailedError,
    WorkflowPlayer,
    WorkflowTerms,
)
from tailrace_agents.ports import EpisodeTakenError, NoJournal
from tailrace_protos.base import pack_float32, pack_int32
from tailrace_protos.chat import ChatMessage
from tailrace_protos.episode import OVER_BUDGET, EnvTask, EpisodeTask, Outcome
from tailrace_protos.generation import SamplingParams, TokenSpan
from tailrace_protos.session import (
    ExportSession,
    ExportStyle,
    OpenSession,
    SessionExport,
    SessionOpened,
)
from tailrace_protos.trajectory import TokenRow
from tests.unit.tailrace_agents.env_world import env_limits

LIMITS = env_limits(256, 0, 0, 0.0)
ROW = TokenRow(
    token_ids=pack_int32([5, 6, 7]),
    loss_mask=b"\x00\x01\x01",
    inference_logprobs=pack_float32([0.0, -1.0, -2.0]),
    spans=(TokenSpan(3, "", 2),),
    turn_ends=pack_int32([3]),
    turn_rewards=pack_float32([0.5]),
    reward=0.5,
)
GOOD_END = WorkflowEnd(Outcome.OK, rewards={"": 0.5})
EXPORT = SessionExport(
    rows=(ROW,),
    messages=(ChatMessage("user", "hi"), ChatMessage("assistant", "ho")),
    rewards=(0.5,),
    metrics={"num_calls": 1.0},
)


class OldJournal(NoJournal):
    """Of an episode that somebody has played before."""

    may_have_records = True


@dataclass
class World:
    """A gateway and a runner that do as told, and remember."""

    end: WorkflowEnd = GOOD_END
    exported: SessionExport | Exception = EXPORT
    opening_fails: bool = False
    no_seat: bool = False
    hangs: bool = False
    log: list[str] = field(default_factory=list)
    requests: list[OpenSession] = field(default_factory=list)
    exports: list[ExportSession] = field(default_factory=list)
    rows: list[dict[str, Any]] = field(default_factory=list)
    entered: asyncio.Event = field(default_factory=asyncio.Event)

    async def open(self, request: OpenSession, *, anew: bool) -> SessionOpened:
        if self.opening_fails:
            raise SessionFailedError("gateway: full")
        self.requests.append(request)
        self.log.append("open anew" if anew else "open")
        return SessionOpened(request.episode_id, "http://h/v1", "key")

    async def export(self, request: ExportSession) -> SessionExport:
        self.exports.append(request)
        self.log.append("export")
        if isinstance(self.exported, Exception):
            raise self.exported
        return self.exported

    def close(self, opened: SessionOpened) -> None:
        self.log.append(f"close {opened.session_id}")

    @asynccontextmanager
    async def seat(self) -> AsyncIterator[World]:
        if self.no_seat:
            raise RunnerFailedError("no process starts")
        self.log.append("seat")
        yield self

    async def run(self, data: dict[str, Any], access: SessionOpened, timeout_s: float) -> WorkflowEnd:
        self.rows.append(data)
        self.entered.set()
        if self.hangs:
            await asyncio.Event().wait()
        return self.end


def task(phase: Any = "train", wall_clock_s: float = 30.0) -> EpisodeTask:
    deadline = time.time() + wall_clock_s
    return EpisodeTask("g7.2", "g7", 2, 0, phase, EnvTask("rows", 11, 4), deadline)


def context(*, is_draining: bool = False) -> PlayContext:
    sampling = PhaseArgs(SamplingParams(temperature=0.7), 64)
    return PlayContext(
        phases={"train": sampling, "eval": sampling},
        max_episode_tokens=256,
        clock=SystemClock(),
        stages=Stages(),
        is_draining=lambda: is_draining,
    )


def player(world: World, *, is_draining: bool = False) -> WorkflowPlayer:
    terms = WorkflowTerms(ExportStyle.CONCAT, 0.9, 20.0)
    return WorkflowPlayer(
        world,
        world,
        context(is_draining=is_draining),
        LIMITS,
        terms,
        lambda task: {"question": task.task.ordinal},
    )


async def play(world: World, made: EpisodeTask | None = None) -> EpisodeResult:
    return await player(world).play(made or task(), NoJournal())


async def test_a_run_becomes_the_gateways_rows_with_its_reward_and_messages() -> None:
    world = World()
    result = await play(world)
    assert world.log == ["seat", "open", "export", "close g7.2"]
    assert (result.outcome, result.row) == (Outcome.OK, {"question": 4})
    assert result.transcript.rows(0.5) == (ROW,)
    assert result.transcript.turn_rewards == (0.5,)
    assert (len(result.transcript), result.transcript.num_sampled, result.transcript.num_turns) == (
        3,
        2,
        1,
    )
    assert [message.content for message in result.messages] == ["hi", "ho"]
    assert world.exports == [ExportSession("g7.2", {"": 0.5}, ExportStyle.CONCAT, 0.9, api_key="key")]


async def test_what_the_reward_service_adds_reaches_every_row() -> None:
    result = await play(World())
    (row,) = result.transcript.rows(0.75)
    assert row.reward == 0.75


async def test_what_the_reward_service_adds_is_not_given_to_a_sub_agent_without_a_reward() -> None:
    sub = replace(ROW, reward=0.0, conversation=1, has_reward=False)
    result = await play(World(exported=replace(EXPORT, rows=(ROW, sub))))
    assert [row.reward for row in result.transcript.rows(0.75)] == [0.75, 0.0]


REFUSED = ("context_length_exceeded",)


@pytest.mark.parametrize("end", [GOOD_END, WorkflowEnd(Outcome.POLICY_FAILURE, "gave up", {"": 0.0})])
@pytest.mark.parametrize("refusals", [(), REFUSED])
async def test_an_episode_whose_calls_were_refused_for_a_limit_says_so(
    end: WorkflowEnd, refusals: tuple[str, ...]
) -> None:
    result = await play(World(end, replace(EXPORT, refusals=refusals)))
    assert (result.outcome, result.reason) == (end.outcome, end.reason)
    assert result.metrics.get(OVER_BUDGET, 0.0) == float(bool(refusals))
    assert result.metrics["num_calls"] == 1.0


@pytest.mark.parametrize(
    ("export", "failed", "late"),
    [
        (EXPORT, Outcome.INFRA_FAILURE, Outcome.TIMEOUT),
        (replace(EXPORT, refusals=REFUSED), Outcome.POLICY_FAILURE, Outcome.POLICY_FAILURE),
        (replace(EXPORT, faults=("reply_cut",)), Outcome.POLICY_FAILURE, Outcome.TIMEOUT),
        (SessionExport(refusals=REFUSED), Outcome.INFRA_FAILURE, Outcome.INFRA_FAILURE),
    ],
)
async def test_the_gateway_knows_whether_the_policy_made_a_run_fail(
    export: SessionExport, failed: Outcome, late: Outcome
) -> None:
    for told, judged in ((Outcome.INFRA_FAILURE, failed), (Outcome.TIMEOUT, late)):
        world = World(WorkflowEnd(told, "the framework hid it"), export)
        result = await play(world)
        assert result.outcome is judged
        assert world.exports[0].rewards == {"": 0.0}
        assert bool(result.transcript.rows(0.0)) == judged.is_valid
        assert ("the framework hid it" in result.reason) == bool(export.rows)


async def test_the_session_has_the_episodes_limits_and_in_evaluations_a_seed() -> None:
    world = World()
    made = task()
    await play(world, made)
    await play(world, task("eval"))
    train, evaluation = world.requests
    assert train.limits.max_episode_tokens == 256
    assert train.limits.max_new_tokens == 64
    assert train.limits.deadline_unix_s == made.deadline_unix_s
    assert (train.sampling.temperature, train.sampling_seed) == (0.7, None)
    assert evaluation.sampling_seed == mix_seed(11, 2)


async def test_an_episode_that_was_played_before_gets_a_new_session() -> None:
    world = World()
    await player(world).play(task(), OldJournal())
    assert world.log[:2] == ["seat", "open anew"]


async def test_a_policy_failure_is_exported_and_counts() -> None:
    world = World(WorkflowEnd(Outcome.POLICY_FAILURE, "gave up", {"": -1.0}))
    result = await play(world)
    assert (result.outcome, result.reason) == (Outcome.POLICY_FAILURE, "gave up")
    assert world.exports[0].rewards == {"": -1.0}


@pytest.mark.parametrize("outcome", [Outcome.INFRA_FAILURE, Outcome.TIMEOUT])
async def test_a_failed_run_has_no_rows_and_its_session_is_closed(outcome: Outcome) -> None:
    world = World(WorkflowEnd(outcome, "why"))
    result = await play(world)
    assert (result.outcome, result.reason, len(result.transcript)) == (outcome, "why", 0)
    assert world.log == ["seat", "open", "export", "close g7.2"]


@pytest.mark.parametrize(
    ("world", "reason"),
    [
        (World(opening_fails=True), "gateway: full"),
        (World(exported=SessionFailedError("gateway: no call c9")), "gateway: no call c9"),
        (World(exported=SessionExport()), "without a model call"),
        (World(no_seat=True), "no process starts"),
    ],
)
async def test_what_the_gateway_or_the_runner_cannot_do_is_an_infrastructure_failure(
    world: World, reason: str
) -> None:
    result = await play(world)
    assert result.outcome is Outcome.INFRA_FAILURE
    assert reason in result.reason
    assert world.log.count("open") == world.log.count("close g7.2")


async def test_the_groups_deadline_ends_a_run(jump_ahead: Callable[[float], None]) -> None:
    world = World(hangs=True)
    playing = asyncio.create_task(play(world, task(wall_clock_s=60.0)))
    await world.entered.wait()
    jump_ahead(61.0)
    result = await playing
    assert result.outcome is Outcome.TIMEOUT
    assert world.log[-1] == "close g7.2"


async def test_a_cancelled_episode_closes_its_session() -> None:
    world = World(hangs=True)
    playing = asyncio.create_task(play(world))
    await world.entered.wait()
    playing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await playing
    assert world.log[-1] == "close g7.2"


async def test_a_worker_that_drains_starts_no_run() -> None:
    world = World()
    with pytest.raises(EpisodeHandedBackError):
        await player(world, is_draining=True).play(task(), NoJournal())
    assert world.log == ["seat"]


class TakenJournal(NoJournal):
    """Of an episode that another worker plays by now."""

    async def require_own(self) -> None:
        raise EpisodeTakenError("g7.2", "fenced")


@pytest.mark.parametrize("exported", [EXPORT, SessionFailedError("gateway: there is no session")])
async def test_a_worker_whose_episode_was_taken_over_settles_nothing(
    exported: SessionExport | Exception,
) -> None:
    world = World(exported=exported)
    with pytest.raises(EpisodeTakenError):
        await player(world).play(task(), TakenJournal())
    assert world.log == ["seat", "open", "export", "close g7.2"]


async def test_a_worker_that_takes_over_an_episode_tells_the_earlier_one_first() -> None:
    world = World()

    class Loaded(OldJournal):
        async def load(self) -> tuple[()]:
            world.log.append("load")
            return ()

    await player(world).play(task(), Loaded())
    assert world.log == ["seat", "load", "open anew", "export", "close g7.2"]
