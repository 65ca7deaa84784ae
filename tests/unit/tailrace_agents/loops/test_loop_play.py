"""Own agent loops: what they may do, how they end, how they are resumed."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, ClassVar, Literal

import msgspec
import numpy as np
import pytest

from tailrace.config import ConfigError, RunConfig
from tailrace.data import DatasetEntry
from tailrace.policy import Stages
from tailrace.sdk import AgentLoop, EpisodeOverError, GenerationFailedError, Tool, tool
from tailrace.sdk.agent_loop import EpisodeEnd
from tailrace.sdk.policy import PromptTooLongError
from tailrace.tools import LocalTools
from tailrace_agents.adapters.player_factory import PlayerFactory
from tailrace_agents.config import AgentsConfig, LoopArgs
from tailrace_agents.core.episode import EpisodeHandedBackError, EpisodeResult
from tailrace_agents.core.loops import SingleTurnLoop, ToolAgentLoop, agent_loops, unknown_loop
from tailrace_agents.core.token_policy import TokenModel
from tailrace_agents.ports import EpisodeTakenError, NoJournal
from tailrace_protos.base import as_float32, as_int32, as_uint8, encode
from tailrace_protos.chat import ChatMessage, ToolCall
from tailrace_protos.episode import OVER_BUDGET, Outcome
from tailrace_protos.generation import SamplingParams
from tailrace_protos.session import ExportStyle
from tests.unit.tailrace_agents.loops.world import (
    LIMITS,
    ChatPolicy,
    RecordList,
    calls,
    chat_renderer,
    echo,
    play,
    task,
)


def user(text: str) -> ChatMessage:
    return ChatMessage("user", text)


class Twice(AgentLoop):
    """Asks a second question; what the second reply says is its own reward."""

    async def run(self, row: dict[str, Any], policy: Any) -> Any:
        messages = [user("Go.")]
        messages.append(await policy.chat(messages))
        policy.set_reward(0.5)
        messages.append(user("Sure?"))
        reply = await policy.chat(messages)
        return policy.finish(float(reply.content), {"length": len(reply.content)})


async def test_a_loop_gives_rewards_to_its_calls() -> None:
    result = await play(Twice, ChatPolicy("A", "2"))
    assert result.transcript.turn_rewards == (0.5, 2.0)
    assert result.metrics["length"] == 1
    (row,) = result.transcript.rows(2.5)
    assert as_float32(row.turn_rewards).tolist() == [0.5, 2.0]
    assert row.reward == 2.5


async def test_what_the_reward_service_adds_belongs_to_the_newest_call() -> None:
    result = await play(Twice, ChatPolicy("A", "2"))
    (row,) = result.transcript.rows(10.0)
    assert as_float32(row.turn_rewards).tolist() == [0.5, 9.5]
    assert row.reward == 10.0


async def test_every_call_is_a_row_where_the_user_wants_it() -> None:
    result = await play(Twice, ChatPolicy("A", "2"), style=ExportStyle.INDIVIDUAL)
    first, second = result.transcript.rows(2.5)
    assert (first.reward, second.reward) == (2.5, 2.0)
    trained = sum(int(as_uint8(row.loss_mask).sum()) for row in (first, second))
    assert trained == result.transcript.num_sampled


async def play_configured(loop: str, args: LoopArgs, policy: ChatPolicy, folder: Path) -> EpisodeResult:
    """Play a loop of this module as a worker with these `loop_args` does."""
    (folder / "rows.jsonl").write_text(json.dumps({"prompt": "Go.", "agent_name": "mine"}))
    config = AgentsConfig(
        datasets={"rows": DatasetEntry(path=str(folder / "rows.jsonl"))},
        agent_loops={"mine": f"{__name__}:{loop}"},
        loop_args=args,
    )
    with ThreadPoolExecutor(1) as threads:
        factory = PlayerFactory(config, RunConfig(exp_name="unit"), "test", threads, Stages())
    players = factory.players(TokenModel(chat_renderer(), policy), LocalTools([]), lambda: False)
    return await players["rows"].play(task(), NoJournal())


@pytest.mark.parametrize(("turn_discount", "first"), [(1.0, 2.5), (0.5, 1.5), (0.0, 0.5)])
async def test_a_call_is_worth_its_discounted_share_of_the_next(
    turn_discount: float, first: float, tmp_path: Path
) -> None:
    args = LoopArgs(export_style="individual", turn_discount=turn_discount)
    result = await play_configured("Twice", args, ChatPolicy("A", "2"), tmp_path)
    assert [row.reward for row in result.transcript.rows(2.5)] == [first, 2.0]


@pytest.mark.parametrize(("scope", "num_reached"), [("episode", 4), ("conversation", 1), ("last", 1)])
async def test_the_reward_of_a_loop_reaches_the_conversations_of_its_scope(
    scope: Literal["episode", "conversation", "last"], num_reached: int, tmp_path: Path
) -> None:
    args = LoopArgs(reward_scope=scope)
    result = await play_configured("Crowd", args, ChatPolicy(by_prompt=by_name), tmp_path)
    rows = result.transcript.rows(3.0)  # the loop's own 1, and 2 of the reward service
    assert [row.reward for row in rows if row.has_reward] == [3.0] * num_reached
    assert sum(result.transcript.turn_rewards) == 3.0


class Speedless(AgentLoop):
    """Ends with a reason of its own and a metric that is no number."""

    async def run(self, row: dict[str, Any], policy: Any) -> Any:
        await policy.chat([user("x")])
        return EpisodeEnd(Outcome.POLICY_FAILURE, "gave up", {"speed": float("nan")})


async def test_a_metric_that_is_no_number_hides_no_reason_of_the_loop() -> None:
    result = await play(Speedless, ChatPolicy("A"))
    assert result.outcome is Outcome.INFRA_FAILURE
    assert result.reason == "gave up; metrics must be finite: speed is nan"
    assert "speed" not in result.metrics


class Crowd(AgentLoop):
    """Asks three helpers at once and then a judge."""

    async def run(self, row: dict[str, Any], policy: Any) -> Any:
        questions = ([user(f"Helper {name}, {row['prompt']}")] for name in "abc")
        answers = await asyncio.gather(*(policy.chat(one) for one in questions))
        summary = " ".join(answer.content for answer in answers)
        await policy.chat([user(f"Judge: {summary}")])
        return policy.finish(1.0)


def by_name(prompt: str) -> str:
    return "Verdict." if "Judge" in prompt else f"I am {prompt.partition('Helper ')[2][0]}."


async def test_conversations_at_the_same_time_become_rows_of_their_own() -> None:
    policy = ChatPolicy(by_prompt=by_name)
    result = await play(Crowd, policy)
    rows = result.transcript.rows(1.0)
    assert len(rows) == 4
    trained = [as_int32(row.token_ids)[as_uint8(row.loss_mask) > 0] for row in rows]
    texts = {chat_renderer().decode(ids) for ids in trained}
    assert texts == {"I am a.", "I am b.", "I am c.", "Verdict."}
    assert "I am a. I am b. I am c." in policy.prompts[-1]
    assert [row.reward for row in rows] == [1.0] * 4  # the episode's reward reaches the helpers too
    assert all(row.has_reward for row in rows)


class Tokens(AgentLoop):
    """Works with token ids: continues its own tokens, then forks."""

    async def run(self, row: dict[str, Any], policy: Any) -> Any:
        prompt = policy.renderer.opening_ids((user(row["prompt"]),))
        first = await policy.generate(prompt)
        longer = np.concatenate([prompt, first.token_ids, policy.renderer.observation_ids("x", False)])
        await policy.generate(longer, max_new_tokens=2, sampling=SamplingParams(temperature=0.0))
        await policy.generate(prompt[:-1])
        return policy.finish()


async def test_token_level_calls_continue_by_exact_prefix_only() -> None:
    policy = ChatPolicy("one", "two", "three")
    result = await play(Tokens, policy)
    rows = result.transcript.rows(0.0)
    assert len(rows) == 2
    assert as_int32(rows[0].token_ids).tolist()[: len(policy.prompt_ids[1])] == policy.prompt_ids[1]
    assert policy.budgets[1] == 2
    assert policy.samplings[1].temperature == 0.0
    assert policy.samplings[1].stop_token_ids == chat_renderer().stop_token_ids


class Bounded(AgentLoop):
    """Asks for a reply of as many tokens as its class says."""

    most: ClassVar[int] = 0

    async def run(self, row: dict[str, Any], policy: Any) -> Any:
        await policy.complete([user("x")], max_new_tokens=self.most)
        return policy.finish()


@pytest.mark.parametrize("most", [0, -3])
async def test_a_call_that_may_sample_no_token_is_the_loops_error(
    most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Bounded, "most", most)
    policy = ChatPolicy("a")
    result = await play(Bounded, policy)
    assert result.outcome is Outcome.INFRA_FAILURE
    assert f"max_new_tokens is {most}: a call samples at least one token" in result.reason
    assert policy.budgets == []


async def test_a_call_that_an_empty_text_stops_is_the_loops_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def asks(policy: Any) -> Any:
        await policy.complete([user("y")], sampling=SamplingParams(stop=("\n", "")))

    monkeypatch.setattr(Odd, "end", asks)
    result = await play(Odd, policy := ChatPolicy("a", "b"))
    assert result.outcome is Outcome.INFRA_FAILURE
    assert "sampling.stop holds an empty text" in result.reason
    assert len(policy.budgets) == 1


class Raises(AgentLoop):
    error: Exception = RuntimeError("lost")

    async def run(self, row: dict[str, Any], policy: Any) -> Any:
        await policy.chat([user("x")])
        raise self.error


@pytest.mark.parametrize("error", [KeyError("x"), TimeoutError("mine"), RuntimeError("lost")])
async def test_a_loops_exception_is_the_outcome_of_its_episode(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Raises, "error", error)
    result = await play(Raises, ChatPolicy("a"))
    assert result.outcome is Outcome.INFRA_FAILURE
    assert f"agent loop Raises raised {type(error).__name__}" in result.reason
    assert result.transcript.num_turns == 1


class Returns(AgentLoop):
    """Asks twice and returns the row's `made`; None: nothing."""

    async def run(self, row: dict[str, Any], policy: Any) -> Any:
        first = await policy.complete([user("x")])
        await policy.complete([user("y")])
        made = row.get("made")
        return {first.completion_id: made["first"]} if isinstance(made, dict) else made


@pytest.mark.parametrize(
    ("made", "rewards"),
    [(None, (0.0, 0.0)), (1.5, (0.0, 1.5)), (2, (0.0, 2.0)), ({"first": 0.5}, (0.5, 0.0))],
)
async def test_a_loop_returns_its_reward_or_rewards_or_nothing(made: Any, rewards: Any) -> None:
    result = await play(Returns, ChatPolicy("a", "b"), row={"made": made})
    assert result.outcome is Outcome.OK
    assert result.transcript.turn_rewards == rewards


@pytest.mark.parametrize("made", ["text", float("nan"), [1.0]])
async def test_a_loop_that_returns_something_else_is_told_what_to_return(made: Any) -> None:
    result = await play(Returns, ChatPolicy("a", "b"), row={"made": made})
    assert result.outcome is Outcome.INFRA_FAILURE
    assert "Returns.run returned" in result.reason


class Odd(AgentLoop):
    """Ends as the test says."""

    end: Any = None

    async def run(self, row: dict[str, Any], policy: Any) -> Any:
        await policy.chat([user("x")])
        return await type(self).end(policy)


async def _cancelled(_policy: Any) -> Any:
    raise asyncio.CancelledError


async def _exits(_policy: Any) -> Any:
    raise SystemExit(3)


def _ends(make: Any) -> Any:
    async def end(policy: Any) -> Any:
        return make(policy)

    return end


@pytest.mark.parametrize(
    ("end", "said"),
    [
        (
            _ends(lambda policy: policy.finish(1.0, {"speed": None})),
            "metric 'speed' the value NoneType",
        ),
        (_ends(lambda policy: policy.finish(1.0, {"speed": "fast"})), "metric 'speed' the value str"),
        (_ends(lambda policy: policy.finish(1.0, {"speed": 10**400})), "speed is inf"),
        (_ends(lambda policy: policy.finish(1.0, ["speed"])), "metrics of list"),
        (_ends(lambda _policy: EpisodeEnd("ok")), "outcome 'ok'"),  # type: ignore[arg-type]
        (_ends(lambda policy: policy.set_reward(None)), "set_reward got NoneType: give a number"),
        (_ends(lambda policy: policy.set_reward(float("nan"))), "set_reward got nan"),
        (_ends(lambda policy: policy.finish("1")), "set_episode_reward got str: give a number"),
        (_ends(lambda policy: policy.finish(float("inf"))), "set_episode_reward got inf"),
        (_cancelled, "the played code cancelled itself"),
        (_exits, "the played code tried to end its process: SystemExit(3)"),
    ],
)
async def test_an_end_that_cannot_be_settled_is_told(
    end: Any, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Odd, "end", end)
    result = await play(Odd, ChatPolicy("a"))
    assert result.outcome is Outcome.INFRA_FAILURE
    assert said in result.reason


async def test_metrics_of_numpy_and_of_odd_names_can_be_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    metrics = {"speed": np.float32(0.5), "won": np.bool_(True), 3: 2, "\ud800": 1.0}
    monkeypatch.setattr(Odd, "end", _ends(lambda policy: policy.finish(1.0, metrics)))
    result = await play(Odd, ChatPolicy("a"))
    assert msgspec.msgpack.decode(encode(result.metrics), type=dict[str, float]) == result.metrics
    assert {"speed": 0.5, "won": 1.0, "3": 2.0}.items() <= result.metrics.items()


class Idle(AgentLoop):
    async def run(self, row: dict[str, Any], policy: Any) -> Any:
        return policy.finish(1.0) if row.get("rewarded") else policy.finish()


async def test_an_episode_without_a_model_call_teaches_nothing() -> None:
    for row in ({}, {"rewarded": True}):
        result = await play(Idle, ChatPolicy(), row=row)
        assert result.outcome is Outcome.INFRA_FAILURE
        assert result.transcript.rows(0.0) == ()


class Greedy(AgentLoop):
    """Asks for ever, in two conversations at once."""

    async def run(self, row: dict[str, Any], policy: Any) -> Any:
        while True:
            async with asyncio.TaskGroup() as group:
                for name in "ab":
                    group.create_task(policy.chat([user(name)]))


async def test_a_budget_that_ends_inside_a_group_of_tasks_is_a_policy_failure() -> None:
    result = await play(
        Greedy, ChatPolicy(by_prompt=lambda _: "y"), limits=LIMITS._replace(max_turns=5)
    )
    assert result.outcome is Outcome.POLICY_FAILURE
    assert result.metrics[OVER_BUDGET] == 1.0
    assert "max_turns" in result.reason


class Stubborn(AgentLoop):
    """Swallows whatever comes, and claims success."""

    async def run(self, row: dict[str, Any], policy: Any) -> Any:
        try:
            await policy.chat([user("x")])
            await policy.chat([user("y")])
            await policy.tools.call(ToolCall("1", "echo", json.dumps({"text": "z"})))
        except (Exception, asyncio.CancelledError):  # noqa: BLE001  as users do
            pass
        return policy.finish(1.0)


async def test_an_episode_beyond_its_deadline_times_out_whatever_its_loop_says(
    jump_ahead: Callable[[float], None],
) -> None:
    async def never() -> str:
        jump_ahead(61.0)
        await asyncio.Event().wait()
        return ""

    result = await play(Stubborn, ChatPolicy("a", never), deadline_s=60.0)
    assert result.outcome is Outcome.TIMEOUT
    assert result.transcript.num_turns == 1


class Careless(AgentLoop):
    """Ends while a call is on its way, and leaves a task behind that calls once more."""

    left: ClassVar[list[asyncio.Task[Any]]] = []
    replies: ClassVar[asyncio.Event]

    async def run(self, row: dict[str, Any], policy: Any) -> Any:
        await policy.chat([user("x")])

        async def late() -> None:
            await Careless.replies.wait()
            await policy.chat([user("z")])

        Careless.left = [
            asyncio.create_task(policy.chat([user("y")])),
            asyncio.create_task(late()),
        ]
        await asyncio.sleep(0)
        return policy.finish(1.0)


async def test_what_a_loop_left_behind_samples_nothing_after_the_end() -> None:
    Careless.replies = asyncio.Event()

    async def slow() -> str:
        await Careless.replies.wait()
        return "b"

    asked, journal = ChatPolicy("a", slow, "c"), RecordList()
    result = await play(Careless, asked, journal=journal)
    assert result.outcome is Outcome.OK
    Careless.replies.set()
    ends = await asyncio.gather(*Careless.left, return_exceptions=True)
    assert [str(end) for end in ends] == ["the episode has ended"] * 2
    assert len(asked.prompts) == 2
    assert len(journal.records) == result.transcript.num_turns == 1


async def test_a_failed_generation_cannot_be_hidden_by_the_loop() -> None:
    failed = GenerationFailedError("g0.0.1", 3, "server gone")
    result = await play(Stubborn, ChatPolicy("a", failed))
    assert result.outcome is Outcome.INFRA_FAILURE
    assert "server gone" in result.reason


class Talkative(AgentLoop):
    """Asks for ever."""

    async def run(self, row: dict[str, Any], policy: Any) -> Any:
        while True:
            await policy.chat([user("x")])


async def test_a_loop_that_outgrows_the_engine_is_a_policy_failure_with_its_turns() -> None:
    result = await play(Talkative, ChatPolicy("a", PromptTooLongError("g0.0.1", 70, 64)))
    assert result.outcome is Outcome.POLICY_FAILURE
    assert result.metrics[OVER_BUDGET] == 1.0
    assert "engine_length: the prompt has 70 tokens" in result.reason
    assert result.transcript.num_turns == 1


@pytest.mark.parametrize("at", [0, 1, 2])
async def test_an_episode_that_another_worker_plays_is_left_to_it(at: int) -> None:
    journal = RecordList(fails_at=at, error=EpisodeTakenError("g0.0", "fenced"))
    with pytest.raises(EpisodeTakenError):
        await play(Stubborn, ChatPolicy("a", "b"), [echo], journal=journal)


async def test_a_draining_worker_hands_a_loop_back_between_two_calls() -> None:
    replies = ChatPolicy("a", "b")
    with pytest.raises(EpisodeHandedBackError):
        await play(Stubborn, replies, is_draining=lambda: len(replies.prompts) > 0)
    assert len(replies.prompts) == 1


class Observed(AgentLoop):
    """Notes what is left."""

    async def run(self, row: dict[str, Any], policy: Any) -> Any:
        before = policy.remaining
        await policy.chat([user("x")])
        after = policy.remaining
        used = {"turns": before.turns - after.turns, "tokens": before.new_tokens - after.new_tokens}
        try:
            await policy.chat([user("y")])
        except EpisodeOverError as error:
            return policy.finish(metrics=used, reason=error.limit)
        raise AssertionError("one turn too many")


async def test_a_loop_sees_what_is_left_and_may_end_in_time() -> None:
    result = await play(Observed, ChatPolicy("abc"), limits=LIMITS._replace(max_turns=1))
    assert (result.outcome, result.reason) == (Outcome.OK, "max_turns")
    assert (result.metrics["turns"], result.metrics["tokens"]) == (1, 4)


async def test_a_loop_may_change_its_row_without_harm_to_others() -> None:
    class Rude(AgentLoop):
        async def run(self, row: dict[str, Any], policy: Any) -> Any:
            row["prompt"][0]["content"] = "spoilt"
            await policy.chat([user("x")])
            return policy.finish()

    row = {"prompt": [{"role": "user", "content": "fresh"}]}
    result = await play(Rude, ChatPolicy("a"), row=row)
    assert row["prompt"][0]["content"] == "fresh"
    assert result.row["prompt"][0]["content"] == "fresh"


# What is in the journal is neither sampled nor run again


class Bench:
    """A tool that counts its runs."""

    def __init__(self) -> None:
        self.runs: list[str] = []
        runs = self.runs

        @tool
        async def search(query: str) -> str:
            """Search."""
            runs.append(query)
            return f"found {query} {len(runs)}"

        self.tool = search


def find(*queries: str) -> str:
    return calls(*(("search", {"query": query}) for query in queries))


SCRIPT = (find("a", "b"), find("a"), "Found.")


async def test_a_resumed_loop_samples_and_runs_only_what_is_missing() -> None:
    journal, bench = RecordList(), Bench()
    whole = await play(ToolAgentLoop, ChatPolicy(*SCRIPT), [bench.tool], journal=journal)
    assert len(journal.records) == 6
    for num_kept in range(7):
        kept = RecordList(journal.records[:num_kept])
        num_calls = [0, 1, 1, 1, 2, 2, 3][num_kept]
        policy, again = ChatPolicy(*SCRIPT[num_calls:]), Bench()
        again.runs += bench.runs[: num_kept - num_calls]
        before = len(again.runs)
        resumed = await play(ToolAgentLoop, policy, [again.tool], journal=kept)
        assert len(policy.prompts) == 3 - num_calls
        assert len(again.runs) - before == 3 - (num_kept - num_calls)
        assert resumed.num_replayed_turns == num_calls
        assert len(kept.records) == 6
        (row,), (expected,) = resumed.transcript.rows(1.0), whole.transcript.rows(1.0)
        assert bytes(row.token_ids) == bytes(expected.token_ids)
        assert bytes(row.loss_mask) == bytes(expected.loss_mask)


async def test_parallel_calls_get_their_own_answers_back() -> None:
    journal, policy = RecordList(), ChatPolicy(by_prompt=by_name)
    whole = await play(Crowd, policy, journal=journal)
    for order in ([2, 0, 1], [1, 2], [0]):
        kept = RecordList([journal.records[index] for index in order])
        asked = ChatPolicy(by_prompt=by_name)
        resumed = await play(Crowd, asked, journal=kept)
        assert len(asked.prompts) == 4 - len(order)
        expected = {bytes(row.token_ids) for row in whole.transcript.rows(1.0)}
        assert {bytes(row.token_ids) for row in resumed.transcript.rows(1.0)} == expected


async def test_a_loop_that_asks_something_else_after_a_restart_is_answered_anew() -> None:
    journal = RecordList()
    await play(SingleTurnLoop, ChatPolicy("a"), journal=journal, row={"prompt": "First?"})
    policy = ChatPolicy("b")
    result = await play(SingleTurnLoop, policy, journal=journal, row={"prompt": "Other?"})
    assert policy.prompts[0].endswith("Other?<|end|><|start|>assistant\n")
    assert (result.num_replayed_turns, result.messages[-1].content) == (0, "b")
    assert len(result.transcript.rows(0.0)) == 1


class Pile(Tool):
    """Remembers what it was given."""

    name = "pile"
    description = "Put something on the pile."
    parameters: ClassVar[dict[str, Any]] = {
        "type": "object",
        "properties": {"thing": {"type": "string"}},
    }

    async def create(self, session: Any) -> None:
        self.things: list[str] = []

    async def execute(self, arguments: dict[str, Any]) -> str:
        self.things.append(arguments["thing"])
        return " ".join(self.things)


async def test_a_tool_with_state_gets_it_back_before_it_is_called_anew() -> None:
    script = [calls(("pile", {"thing": thing})) for thing in "abc"] + ["Done."]
    journal = RecordList()
    whole = await play(ToolAgentLoop, ChatPolicy(*script), [Pile], journal=journal)
    kept = RecordList(journal.records[:4])  # two replies and their results
    resumed = await play(ToolAgentLoop, ChatPolicy(*script[2:]), [Pile], journal=kept)
    assert [one.content for one in resumed.messages] == [one.content for one in whole.messages]
    assert resumed.messages[-2].content == "a b c"
    assert resumed.metrics["num_repeated_tool_calls"] == 2
    assert resumed.metrics["num_repeated_otherwise"] == 0


async def test_parallel_calls_wait_until_a_tool_with_state_has_it_back() -> None:
    both = calls(("pile", {"thing": "c"}), ("pile", {"thing": "d"}))
    script = [*(calls(("pile", {"thing": thing})) for thing in "ab"), both, "Done."]
    journal = RecordList()
    whole = await play(ToolAgentLoop, ChatPolicy(*script), [Pile], journal=journal)
    kept = RecordList(journal.records[:4])
    resumed = await play(ToolAgentLoop, ChatPolicy(*script[2:]), [Pile], journal=kept)
    assert [one.content for one in resumed.messages[-3:-1]] == ["a b c", "a b c d"]
    assert [one.content for one in resumed.messages] == [one.content for one in whole.messages]


# The registry


def test_own_loops_stand_beside_those_that_come_along() -> None:
    loops = agent_loops({"twice": f"{__name__}:Twice"}, "agents.agent_loops")
    assert set(loops) == {"single_turn_agent", "tool_agent", "twice"}


@pytest.mark.parametrize(
    ("dotted", "problem"),
    [("json:dumps", "is no class with a method run"), ("nowhere_at_all:X", "cannot import")],
)
def test_what_is_no_loop_is_refused_with_its_key(dotted: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem) as caught:
        agent_loops({"mine": dotted}, "agents.agent_loops")
    assert "agents.agent_loops.mine" in str(caught.value)


def test_a_misspelt_agent_is_named_with_the_closest_one() -> None:
    assert "did you mean 'tool_agent'?" in unknown_loop("tools_agent", {"tool_agent": 1, "x": 2})
