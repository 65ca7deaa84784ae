"""One episode: what the model reads, what is kept, how it ends."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from tailrace.channel.generation import Generation
from tailrace.clock import SystemClock
from tailrace.policy.activity import Stages
from tailrace.sdk.policy import GenerationFailedError, PromptTooLongError, TurnRequest
from tailrace_agents.core.env_loop import EnvPlayer
from tailrace_agents.core.environments import EnvPool
from tailrace_agents.core.episode import (
    EpisodeHandedBackError,
    EpisodeResult,
    SamplingPlan,
    mix_seed,
)
from tailrace_agents.core.machine import PhaseArgs, PlayContext
from tailrace_agents.core.model import EnvView
from tailrace_agents.core.token_policy import TokenModel
from tailrace_agents.ports import EpisodeTakenError, NoJournal
from tailrace_envs.game import Answer, TextGame
from tailrace_protos.base import as_float32, as_int32, as_uint8
from tailrace_protos.episode import OVER_BUDGET, EnvTask, EpisodeTask, Outcome
from tailrace_protos.generation import SamplingParams, TokenSpan
from tests.unit.tailrace_agents.env_world import LIMITS, play_env
from tests.unit.tailrace_agents.fakes import ListJournal, ScriptedPolicy, StairsEnv, renderer

CLIMB = ("Right", "Right", "Right")


async def play(env: Any, policy: Any, seed: int = 0, **options: Any) -> EpisodeResult:
    return await play_env(env, renderer(), policy, seed=seed, **options)


async def test_the_model_reads_all_earlier_tokens_and_the_new_message_only() -> None:
    policy = ScriptedPolicy(*CLIMB)
    result = await play(StairsEnv(), policy)
    first = renderer().observation_ids("PFFF\n", first=True).tolist()
    reply = renderer().reply_ids("Right").tolist()
    second = renderer().observation_ids("FFFF\nPFFF\n", first=False).tolist()
    assert policy.prompts[0] == first
    assert policy.prompts[1] == first + reply + second
    assert all(
        longer[: len(shorter)] == shorter
        for shorter, longer in zip(policy.prompts, policy.prompts[1:], strict=False)
    )
    assert result.outcome is Outcome.OK
    assert result.metrics == {"success": 1.0, "num_invalid_actions": 0.0}
    assert result.transcript.turn_rewards == (0.25, 0.25, 1.25)
    assert [message.role for message in result.messages] == ["user", "assistant"] * 3


async def test_row_tell_sampled_tokens_from_inserted_ones() -> None:
    result = await play(StairsEnv(), ScriptedPolicy(*CLIMB, version=7))
    (row,) = result.transcript.rows(0.0)
    mask = as_uint8(row.loss_mask).astype(bool)
    ids = as_int32(row.token_ids)
    reply = renderer().reply_ids("Right")
    assert np.array_equal(ids[mask], np.tile(reply, 3))
    assert row.spans == (TokenSpan(7, "", int(mask.sum())),)
    assert set(as_float32(row.inference_logprobs)[mask]) == {-0.5}
    assert set(as_float32(row.inference_logprobs)[~mask]) == {0.0}
    ends = as_int32(row.turn_ends)
    assert len(ends) == 3
    assert ends[-1] == len(ids) == len(result.transcript)
    assert mask[ends - 1].all()
    assert as_float32(row.turn_rewards).tolist() == [0.25, 0.25, 1.25]


async def test_a_token_without_a_finite_logprob_is_masked_and_counted() -> None:
    class Broken(ScriptedPolicy):
        async def generate(self, request: TurnRequest) -> Generation:
            made = await super().generate(request)
            made.inference_logprobs[0] = np.nan
            return made

    transcript = (await play(StairsEnv(), Broken(*CLIMB))).transcript
    (row,) = transcript.rows(0.0)
    assert transcript.num_nonfinite == 3
    assert as_uint8(row.loss_mask).sum() == 3 * len(renderer().reply_ids("Right")) - 3
    assert np.isfinite(as_float32(row.inference_logprobs)).all()


async def test_an_invalid_reply_is_the_environments_matter() -> None:
    result = await play(StairsEnv(), ScriptedPolicy("Up", *CLIMB))
    assert result.outcome is Outcome.OK
    assert result.metrics["num_invalid_actions"] == 1.0


async def test_a_turn_gets_what_is_left_of_the_episodes_budget() -> None:
    policy = ScriptedPolicy("Left", "Left", "Left")
    per_turn = len(renderer().reply_ids("Left"))
    limits = LIMITS._replace(max_new_tokens=2 * per_turn + 1)
    result = await play(StairsEnv(), policy, limits=limits)
    assert policy.budgets == [2 * per_turn + 1, per_turn + 1, 1]
    assert result.outcome is Outcome.POLICY_FAILURE
    assert "max_new_tokens" in result.reason
    assert result.metrics[OVER_BUDGET] == 1.0
    assert result.transcript.num_sampled == limits.max_new_tokens


class Silent(StairsEnv):
    """Stairs that never tell a success."""

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        *told, info = super().step(action)
        info.pop("success", None)
        return *told, info


class Talking(StairsEnv):
    """Stairs that tell at every step how far up it is."""

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        *told, info = super().step(action)
        return *told, {**info, "success": self.step_number / 3}


class Asked(Silent):
    """Stairs that can be asked, and tell nothing by themselves."""

    def success(self) -> float:
        return float(self.step_number >= 3)


class Game(TextGame):
    """The same stairs as a `TextGame`."""

    def __init__(self) -> None:
        super().__init__(max_turns=9)
        self.stairs = StairsEnv()

    def begin(self, seed: int) -> str:
        return self.stairs.reset(seed=seed)[0]

    def answer(self, reply: str) -> Answer:
        observation, reward, is_over, _, _ = self.stairs.step(reply)
        return Answer(observation, reward, is_over)

    def success(self) -> float:
        return float(self.stairs.step_number >= 3)


@pytest.mark.parametrize(
    ("env", "is_first", "success"),
    [
        (StairsEnv, False, 0.0),  # it tells it at the end, which did not come
        (StairsEnv, True, None),  # nothing is known of it
        (Silent, False, None),
        (Talking, True, pytest.approx(1 / 3)),
        (Asked, True, None),
        (Asked, False, None),
        (Game, True, 0.0),
    ],
)
async def test_an_episode_that_a_limit_cuts_has_the_success_that_its_environment_tells(
    env: type[Any], is_first: bool, success: float | None
) -> None:
    told: set[str] = set()
    if not is_first:
        await play(env(), ScriptedPolicy(*CLIMB), told=told)
    cut = LIMITS._replace(max_new_tokens=2 * len(renderer().reply_ids("Right")))
    result = await play(env(), ScriptedPolicy("Right", "Left", *CLIMB), limits=cut, told=told)
    assert result.outcome is Outcome.POLICY_FAILURE
    assert sum(result.transcript.turn_rewards) == 0.5
    assert result.metrics.get("success") == success


async def test_environments_of_a_pool_know_of_each_other_whether_they_tell_a_success() -> None:
    pool = EnvPool(StairsEnv)
    first, second = pool.take(), pool.take()
    assert not second.reports_success
    await first.reset(0)
    for reply in CLIMB:
        await first.step(reply)
    assert second.reports_success
    assert pool.take().reports_success


async def test_the_length_of_the_episode_bounds_inserted_tokens_too() -> None:
    policy = ScriptedPolicy("Left", "Left", "Left")
    limits = LIMITS._replace(max_episode_tokens=len(renderer().observation_ids("PFFF\n", True)) + 2)
    result = await play(StairsEnv(), policy, limits=limits)
    assert policy.budgets == [2]
    assert result.outcome is Outcome.POLICY_FAILURE


async def test_a_reply_cut_by_its_limit_is_closed_by_the_renderer() -> None:
    policy = ScriptedPolicy("Right", *CLIMB)
    await play(StairsEnv(), policy, limits=LIMITS._replace(max_tokens_per_step=1))
    inserted = policy.prompts[1][len(policy.prompts[0]) + 1 :]
    assert inserted[0] == renderer().end_of_turn_id
    assert inserted[1:] == renderer().observation_ids("FFFF\nPFFF\n", first=False).tolist()


async def test_a_first_observation_that_fits_no_budget_is_no_fault_of_the_policy() -> None:
    result = await play(StairsEnv(), ScriptedPolicy(), limits=LIMITS._replace(max_episode_tokens=2))
    assert result.outcome is Outcome.INFRA_FAILURE
    assert "max_episode_tokens" in result.reason


class Raising(StairsEnv):
    def __init__(self, where: str, error: BaseException) -> None:
        super().__init__()
        self.where, self.error = where, error

    def reset(self, **names: Any) -> Any:
        if self.where == "reset":
            raise self.error
        return super().reset(**names)

    def step(self, action: str) -> Any:
        if self.where == "step" and self.replies:
            raise self.error
        return super().step(action)


@pytest.mark.parametrize("where", ["reset", "step"])
@pytest.mark.parametrize("error", [KeyError("x"), TimeoutError("mine"), RuntimeError("lost")])
async def test_an_environments_exception_is_the_outcome_of_its_episode(
    where: str, error: Exception
) -> None:
    result = await play(Raising(where, error), ScriptedPolicy(*CLIMB))
    assert result.outcome is Outcome.INFRA_FAILURE
    assert f"env.{where} raised {type(error).__name__}" in result.reason


@pytest.mark.parametrize(
    "step",
    [(3, 0.0, False, False, {}), ("text", 0.0, False, False), ("text", float("nan"), False, False, {})],
)
async def test_an_environments_nonsense_is_the_outcome_of_its_episode(step: Any) -> None:
    env = StairsEnv()
    env.step = lambda action: step  # type: ignore[method-assign]
    result = await play(env, ScriptedPolicy(*CLIMB))
    assert result.outcome is Outcome.INFRA_FAILURE
    assert "env.step" in result.reason


@pytest.mark.parametrize("where", ["reset", "step"])
@pytest.mark.parametrize("error", [SystemExit(2), asyncio.CancelledError()])
async def test_an_environment_ends_no_worker_and_cancels_no_other(
    where: str, error: BaseException
) -> None:
    result = await play(Raising(where, error), ScriptedPolicy(*CLIMB))
    assert result.outcome is Outcome.INFRA_FAILURE
    assert "the played code" in result.reason
    assert where in result.reason  # the place in the code


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
async def test_a_metric_that_is_no_number_is_named_and_left_out(value: float) -> None:
    env = StairsEnv()
    numbers = {"speed": value, "height": 2.0}
    env.step = lambda action: ("over", 1.0, True, False, numbers)  # type: ignore[assignment,method-assign]
    result = await play(env, ScriptedPolicy(*CLIMB))
    assert result.outcome is Outcome.INFRA_FAILURE
    assert result.reason == f"metrics must be finite: speed is {value}"
    assert result.metrics["height"] == 2.0
    assert "speed" not in result.metrics


@pytest.mark.parametrize(("success", "is_possible"), [(57.0, False), (-1.0, False), (1.0000001, True)])
async def test_a_success_is_a_number_from_0_to_1(success: float, is_possible: bool) -> None:
    env = StairsEnv()
    env.step = lambda action: ("over", 1.0, True, False, {"success": success})  # type: ignore[assignment,method-assign]
    result = await play(env, ScriptedPolicy(*CLIMB))
    assert (result.outcome is Outcome.OK) is is_possible
    assert ("success" in result.metrics) is is_possible
    told = "" if is_possible else f"success must be a number from 0 to 1: success is {success}"
    assert result.reason == told


async def test_a_policy_that_cannot_generate_is_an_infrastructure_failure() -> None:
    class Failing(ScriptedPolicy):
        async def generate(self, request: TurnRequest) -> Generation:
            raise GenerationFailedError("g0.0.0", 3, "server gone")

    result = await play(StairsEnv(), Failing())
    assert result.outcome is Outcome.INFRA_FAILURE
    assert "server gone" in result.reason


class Full(ScriptedPolicy):
    """The model of an engine whose sequences have at most `longest` tokens."""

    def __init__(self, longest: int, *replies: str) -> None:
        super().__init__(*replies)
        self.longest = longest

    async def generate(self, request: TurnRequest) -> Generation:
        num_prompt = len(request.prompt_ids) // 4
        if num_prompt >= self.longest:
            raise PromptTooLongError("g0.0.1", num_prompt, self.longest)
        return await super().generate(request)


async def test_an_episode_that_outgrows_the_engine_is_a_policy_failure_with_its_turns() -> None:
    opening = len(renderer().observation_ids("PFFF\n", True))
    result = await play(StairsEnv(), Full(opening + 1, "Left", "Left"))
    assert result.outcome is Outcome.POLICY_FAILURE
    assert result.reason.startswith("engine_length: the prompt has ")
    assert f"the engine's longest sequence has {opening + 1}" in result.reason
    assert result.metrics[OVER_BUDGET] == 1.0
    assert result.transcript.num_turns == 1


async def test_a_first_observation_that_fits_no_engine_is_no_fault_of_the_policy() -> None:
    result = await play(StairsEnv(), Full(2))
    assert result.outcome is Outcome.INFRA_FAILURE
    assert "before the first model call: engine_length" in result.reason


class Silent(ScriptedPolicy):
    """Answers once, then never; `asked` is set then."""

    def __init__(self, *replies: str) -> None:
        super().__init__(*replies)
        self.asked = asyncio.Event()

    async def generate(self, request: TurnRequest) -> Generation:
        if self.prompts:
            self.asked.set()
            await asyncio.Event().wait()
        return await super().generate(request)


async def test_an_episode_beyond_its_deadline_times_out_with_the_turns_it_has(
    jump_ahead: Callable[[float], None],
) -> None:
    policy, limits = Silent("Right"), LIMITS._replace(wall_clock_s=60.0)
    playing = asyncio.create_task(play(StairsEnv(), policy, limits=limits, journal=ListJournal()))
    await policy.asked.wait()
    jump_ahead(61.0)
    result = await playing
    assert result.outcome is Outcome.TIMEOUT
    assert result.transcript.num_turns == 1


async def test_a_cancelled_episode_is_cancelled_and_no_outcome() -> None:
    task = asyncio.create_task(play(StairsEnv(), Silent("Right")))
    await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_evaluation_turns_have_seeds_of_their_own_that_repeat() -> None:
    plan = SamplingPlan(SamplingParams(temperature=0.7), seed=mix_seed(5, 0))
    first, again, other = (ScriptedPolicy(*CLIMB) for _ in range(3))
    await play(StairsEnv(), first, sampling=plan)
    await play(StairsEnv(), again, sampling=plan)
    await play(StairsEnv(), other, sampling=plan._replace(seed=mix_seed(5, 1)))
    seeds = [params.seed for params in first.samplings]
    assert len(set(seeds)) == 3
    assert all(0 <= (seed or 0) < 2**63 for seed in seeds)
    assert seeds == [params.seed for params in again.samplings]
    assert not set(seeds) & {params.seed for params in other.samplings}
    assert {params.temperature for params in first.samplings} == {0.7}


async def test_a_redelivered_episode_goes_on_after_its_recorded_turns() -> None:
    journal = ListJournal()
    whole = await play(StairsEnv(), ScriptedPolicy(*CLIMB, version=3), journal=journal)
    for num_kept in range(4):
        policy = ScriptedPolicy(*CLIMB[num_kept:], version=3)
        resumed = await play(StairsEnv(), policy, journal=ListJournal(journal.records[:num_kept]))
        assert policy.turns == list(range(num_kept, 3))
        assert resumed.num_replayed_turns == num_kept
        assert resumed.transcript.rows(1.0) == whole.transcript.rows(1.0)
        assert resumed.messages == whole.messages
        assert resumed.metrics == whole.metrics


async def test_an_environment_that_is_not_deterministic_begins_anew() -> None:
    journal = ListJournal()
    await play(StairsEnv(), ScriptedPolicy("Left", "Right", "Right", "Right"), journal=journal)
    partial = ListJournal(journal.records[:2])
    policy = ScriptedPolicy("Right", "Right")
    result = await play(StairsEnv(), policy, seed=1, journal=partial)  # another first observation
    assert result.num_restarts == 1
    assert result.num_replayed_turns == 0
    assert partial.num_clears == 1
    assert policy.turns == [0, 1]
    assert len(partial.records) == 2
    assert result.outcome is Outcome.OK


async def test_a_changed_reward_counts_as_not_deterministic_too() -> None:
    journal = ListJournal()
    await play(StairsEnv(), ScriptedPolicy(*CLIMB), journal=journal)
    env = StairsEnv()
    step = env.step
    env.step = lambda action: (step(action)[0], 9.0, False, True, {})  # type: ignore[method-assign]
    result = await play(env, ScriptedPolicy("Right"), journal=ListJournal(journal.records[:2]))
    assert result.num_restarts == 1
    assert result.transcript.turn_rewards == (9.0,)


async def test_a_turn_is_in_the_journal_before_the_next_is_sampled() -> None:
    journal = ListJournal()

    class Checking(ScriptedPolicy):
        async def generate(self, request: TurnRequest) -> Generation:
            assert len(journal.records) == request.turn
            return await super().generate(request)

    await play(StairsEnv(), Checking(*CLIMB), journal=journal)
    assert len(journal.records) == 3


async def test_an_episode_that_somebody_else_plays_is_left_alone() -> None:
    policy = ScriptedPolicy(*CLIMB)
    with pytest.raises(EpisodeTakenError):
        await play(StairsEnv(), policy, journal=ListJournal(taken_at=1))
    assert policy.turns == [0, 1]


async def test_a_draining_worker_stops_between_two_turns() -> None:
    journal, policy = ListJournal(), ScriptedPolicy(*CLIMB)
    with pytest.raises(EpisodeHandedBackError):
        await play(StairsEnv(), policy, journal=journal, is_draining=lambda: len(journal.records) == 2)
    assert policy.turns == [0, 1]
    resumed = ScriptedPolicy("Right")
    result = await play(StairsEnv(), resumed, journal=journal)
    assert resumed.turns == [2]
    assert result.outcome is Outcome.OK


async def test_an_observer_sees_every_state() -> None:
    class Seen:
        def __init__(self) -> None:
            self.states: list[tuple[str, str, bool]] = []

        def on_reset(self, observation: str) -> None:
            self.states.append(("", observation, False))

        def on_turn(self, reply: str, observation: str, reward: float, done: bool) -> None:
            self.states.append((reply, observation, done))

        async def save(self) -> None:
            raise AssertionError("only a player saves")

    seen = Seen()
    await play(StairsEnv(), ScriptedPolicy("Right", "Right"), seed=1, observer=seen)
    assert [done for _, _, done in seen.states] == [False, False, True]
    assert [reply for reply, _, _ in seen.states] == ["", "Right", "Right"]


async def test_an_environment_that_blocks_in_its_thread_stops_nobody_else() -> None:
    entered, leave = threading.Event(), threading.Event()

    class Blocking(StairsEnv):
        def step(self, action: str) -> Any:
            entered.set()
            leave.wait(60)
            return super().step(action)

    with ThreadPoolExecutor(1) as threads:
        stuck = asyncio.create_task(play(Blocking(), ScriptedPolicy(*CLIMB), threads=threads))
        while not entered.is_set():
            await asyncio.sleep(0)
        others = await asyncio.gather(*(play(StairsEnv(), ScriptedPolicy(*CLIMB)) for _ in range(20)))
        assert not stuck.done()
        leave.set()
        assert (await stuck).outcome is Outcome.OK
    assert {result.outcome for result in others} == {Outcome.OK}


async def test_a_thousand_episodes_play_at_once_each_with_its_own_end() -> None:
    def env(index: int) -> StairsEnv:
        return Raising("step", ValueError(str(index))) if index % 10 == 0 else StairsEnv()

    results = await asyncio.gather(*(play(env(i), ScriptedPolicy(*CLIMB)) for i in range(1000)))
    failed = [i for i, result in enumerate(results) if result.outcome is Outcome.INFRA_FAILURE]
    assert failed == list(range(0, 1000, 10))
    assert all(str(i) in results[i].reason for i in failed)


async def test_an_environment_that_cannot_be_closed_costs_no_episode() -> None:
    class Unclosable(StairsEnv):
        def close(self) -> None:
            raise OSError("busy")

    args = PhaseArgs(SamplingParams(), LIMITS.max_new_tokens)
    context = PlayContext({"train": args}, 4096, SystemClock(), Stages(), lambda: False)
    model = TokenModel(renderer(), ScriptedPolicy(*CLIMB))
    player = EnvPlayer(EnvPool(Unclosable, max_idle=0), context, model, LIMITS, EnvView())
    deadline_unix_s = SystemClock().unix_s() + 20.0
    task = EpisodeTask("g0.0", "g0", 0, 0, "train", EnvTask("stairs", 0), deadline_unix_s)
    assert (await player.play(task, NoJournal())).outcome is Outcome.OK
