"""The agent loops that come with Tailrace: what the model reads, what is trained, how they end."""

from __future__ import annotations

import asyncio
import threading
from typing import Any, ClassVar

import numpy as np
import pytest

from tailrace.sdk import Tool, ToolOutput, ToolUnavailableError, tool
from tailrace_agents.config import LoopArgs
from tailrace_agents.core.loops import SingleTurnLoop, ToolAgentLoop
from tailrace_protos.base import as_int32, as_uint8
from tailrace_protos.episode import OVER_BUDGET, Outcome
from tests.unit.tailrace_agents.loops.world import (
    LIMITS,
    ChatPolicy,
    broken,
    calls,
    chat_renderer,
    echo,
    play,
)


def say(text: str) -> tuple[str, dict[str, Any]]:
    return "echo", {"text": text}


async def test_a_single_turn_is_the_prompt_and_the_sampled_reply() -> None:
    policy = ChatPolicy("Four.")
    result = await play(SingleTurnLoop, policy, row={"prompt": "2+2?"})
    (row,) = result.transcript.rows(1.0)
    sampled = chat_renderer().reply_ids("Four.")
    assert as_int32(row.token_ids).tolist() == policy.prompt_ids[0] + sampled.tolist()
    mask = as_uint8(row.loss_mask).astype(bool)
    assert np.array_equal(as_int32(row.token_ids)[mask], sampled)
    assert policy.prompts == ["<|start|>user\n2+2?<|end|><|start|>assistant\n"]
    assert [(one.role, one.content) for one in result.messages] == [
        ("user", "2+2?"),
        ("assistant", "Four."),
    ]
    assert (result.outcome, row.reward) == (Outcome.OK, 1.0)
    assert result.metrics["num_cut_replies"] == 0


async def test_a_reply_that_its_limit_cut_is_not_taken_for_a_finished_one() -> None:
    limits = LIMITS._replace(max_tokens_per_step=3)
    result = await play(SingleTurnLoop, ChatPolicy("Forty-two."), limits=limits)
    assert result.metrics["num_cut_replies"] == 1
    assert result.messages[-1].content == "For"


@tool
def judge(text: str) -> ToolOutput:
    """Judge."""
    return ToolOutput("heard", metrics={"success": float(text == "hi"), "num_letters": len(text)})


async def test_the_newest_success_that_a_tool_tells_counts_and_other_metrics_are_summed() -> None:
    said = [calls(("judge", {"text": text})) for text in ("hello", "hi", "hi")]
    result = await play(ToolAgentLoop, ChatPolicy(*said, "Done."), [judge])
    assert (result.outcome, result.reason) == (Outcome.OK, "")
    assert (result.metrics["success"], result.metrics["num_letters"]) == (1.0, 9.0)


async def test_a_tools_answer_is_appended_to_all_tokens_so_far() -> None:
    policy = ChatPolicy(calls(say("hi"), text="Wait. "), "It said hi.")
    result = await play(ToolAgentLoop, policy, [echo])
    first, second = policy.prompt_ids
    reply = chat_renderer().reply_ids(calls(say("hi"), text="Wait. ")).tolist()
    assert second[: len(first) + len(reply)] == first + reply
    assert policy.prompts[0].startswith("<|start|>tools echo<|end|>")
    assert policy.prompts[1].endswith("<|start|>tool\necho hi<|end|><|start|>assistant\n")
    (row,) = result.transcript.rows(0.5)
    assert as_uint8(row.loss_mask).sum() == result.transcript.num_sampled
    assert (result.outcome, result.transcript.num_turns) == (Outcome.OK, 2)
    assert result.metrics["num_tool_calls"] == 1
    assert [one.role for one in result.messages] == ["user", "assistant", "tool", "assistant"]


async def test_all_calls_of_a_reply_run_and_at_the_same_time() -> None:
    together = asyncio.Barrier(5)

    @tool
    async def meet(name: str) -> str:
        """Wait for the others."""
        await together.wait()
        return f"met {name}"

    names = ["a", "b", "c", "d", "e"]
    policy = ChatPolicy(calls(*(("meet", {"name": name}) for name in names)), "Done.")
    result = await play(ToolAgentLoop, policy, [meet])
    assert result.outcome is Outcome.OK
    answers = [one.content for one in result.messages if one.role == "tool"]
    assert answers == [f"met {name}" for name in names]


async def test_blocking_tools_do_not_make_episodes_wait_for_each_other() -> None:
    together = threading.Barrier(6)

    @tool
    def block() -> str:
        """Wait in a thread until all episodes are here."""
        together.wait(timeout=60)
        return "here"

    async with asyncio.TaskGroup() as group:
        playing = [
            group.create_task(play(ToolAgentLoop, ChatPolicy(calls(("block", {})), "Yes."), [block]))
            for _ in range(6)
        ]
    for episode in playing:
        assert [one.content for one in episode.result().messages if one.role == "tool"] == ["here"]


class Counter(Tool):
    """Counts its own calls, from `start`."""

    name = "count"
    description = "Count."
    parameters: ClassVar[dict[str, Any]] = {"type": "object", "properties": {}}
    log: ClassVar[list[str]] = []

    async def create(self, session: Any) -> None:
        self.value = session.create_kwargs.get("start", 0)
        self.log.append(f"create {session.episode_id}")

    async def execute(self, arguments: dict[str, Any]) -> str:
        self.value += 1
        if self.value > 100:
            raise ToolUnavailableError("counted too far")
        return str(self.value)

    async def release(self) -> None:
        self.log.append("release")


@pytest.fixture
def counter_log() -> list[str]:
    Counter.log.clear()
    return Counter.log


async def test_a_tools_object_lives_as_long_as_the_episode(counter_log: list[str]) -> None:
    policy = ChatPolicy(calls(("count", {}), ("count", {})), calls(("count", {})), "Three.")
    row = {"tools_kwargs": {"count": {"start": 10}}}
    result = await play(ToolAgentLoop, policy, [Counter], row=row)
    answers = [one.content for one in result.messages if one.role == "tool"]
    assert sorted(answers) == ["11", "12", "13"]
    assert answers[-1] == "13"
    assert counter_log == ["create g0.0", "release"]


async def test_a_tools_object_is_released_when_the_episode_fails(counter_log: list[str]) -> None:
    policy = ChatPolicy(calls(("count", {})), ValueError("engine on fire"))
    result = await play(ToolAgentLoop, policy, [Counter])
    assert result.outcome is Outcome.INFRA_FAILURE
    assert counter_log == ["create g0.0", "release"]


async def test_a_tools_object_is_released_when_the_episode_is_cancelled(
    counter_log: list[str],
) -> None:
    asked_again = asyncio.Event()

    async def never() -> str:
        asked_again.set()
        await asyncio.Event().wait()
        return ""

    playing = asyncio.create_task(
        play(ToolAgentLoop, ChatPolicy(calls(("count", {})), never), [Counter])
    )
    await asyncio.wait_for(asked_again.wait(), 60)
    playing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await playing
    assert counter_log == ["create g0.0", "release"]


async def test_a_tool_that_cannot_work_is_no_fault_of_the_policy(counter_log: list[str]) -> None:
    row = {"tools_kwargs": {"count": {"start": 100}}}
    result = await play(ToolAgentLoop, ChatPolicy(calls(("count", {})), "?"), [Counter], row=row)
    assert result.outcome is Outcome.INFRA_FAILURE
    assert "counted too far" in result.reason
    assert counter_log[-1] == "release"


async def test_what_went_wrong_with_a_call_is_read_by_the_model() -> None:
    bad = calls(("broken", {"text": "fly"}), ("echo", {"words": 3}), ("fly", {}))
    policy = ChatPolicy(bad, "Sorry.")
    result = await play(ToolAgentLoop, policy, [echo, broken])
    raised, wrong_arguments, unknown = [one.content for one in result.messages if one.role == "tool"]
    assert "cannot fly" in raised
    assert "`words`" in wrong_arguments
    assert "no tool 'fly'" in unknown
    assert result.outcome is Outcome.OK
    assert result.metrics["num_tool_errors"] == 3


async def test_a_call_that_cannot_be_read_is_answered_and_counted() -> None:
    policy = ChatPolicy('<tool_call>\n{"name": "echo", "argu\n</tool_call>', "I see.")
    result = await play(ToolAgentLoop, policy, [echo])
    assert "could not be read" in policy.prompts[1]
    assert result.metrics["num_malformed_tool_calls"] == 1
    assert (result.outcome, result.messages[-1].content) == (Outcome.OK, "I see.")


async def test_calls_that_can_be_read_run_beside_one_that_cannot() -> None:
    policy = ChatPolicy(calls(say("a")) + "<tool_call>\n{]\n</tool_call>", "Done.")
    result = await play(ToolAgentLoop, policy, [echo])
    assert "echo a" in policy.prompts[1]
    assert "could not be read" in policy.prompts[1]
    assert result.outcome is Outcome.OK


async def test_a_turn_gets_what_is_left_of_the_episodes_budget() -> None:
    first, second = calls(say("a")), calls(say("b"))
    policy = ChatPolicy(first, second, "x")
    used = [len(chat_renderer().reply_ids(text)) for text in (first, second)]
    budget = sum(used) + 5
    await play(ToolAgentLoop, policy, [echo], max_new_tokens=budget)
    assert policy.budgets == [budget, budget - used[0], 5]


async def test_an_episode_over_its_budget_is_a_policy_failure_with_its_turns() -> None:
    first = calls(say("a"))
    policy = ChatPolicy(first, "unheard")
    budget = len(chat_renderer().reply_ids(first))
    result = await play(ToolAgentLoop, policy, [echo], max_new_tokens=budget)
    assert result.outcome is Outcome.POLICY_FAILURE
    assert "max_new_tokens" in result.reason
    assert result.metrics[OVER_BUDGET] == 1.0
    (row,) = result.transcript.rows(0.0)
    assert as_uint8(row.loss_mask).sum() == budget


async def test_inserted_tokens_count_towards_the_length_of_the_episode() -> None:
    limits = LIMITS._replace(max_episode_tokens=200)
    policy = ChatPolicy(calls(say("a" * 90)), "unheard")
    result = await play(ToolAgentLoop, policy, [echo], limits=limits)
    assert policy.budgets == [200 - len(policy.prompt_ids[0])]
    assert result.outcome is Outcome.POLICY_FAILURE
    assert "max_episode_tokens" in result.reason


async def test_a_prompt_that_fits_no_budget_is_no_fault_of_the_policy() -> None:
    limits = LIMITS._replace(max_episode_tokens=10)
    result = await play(ToolAgentLoop, ChatPolicy(), [echo], limits=limits)
    assert result.outcome is Outcome.INFRA_FAILURE
    assert "before the first model call: max_episode_tokens" in result.reason
    assert result.transcript.rows(0.0) == ()


async def test_a_model_that_never_stops_calling_is_stopped() -> None:
    policy = ChatPolicy(*(calls(say(str(turn))) for turn in range(9)))
    result = await play(ToolAgentLoop, policy, [echo], limits=LIMITS._replace(max_turns=3))
    assert len(policy.prompts) == 3
    assert result.outcome is Outcome.POLICY_FAILURE
    assert "max_turns" in result.reason


async def test_a_long_output_is_cut_with_a_mark_and_counted() -> None:
    @tool
    async def flood() -> str:
        """Too much."""
        return "<" + "x" * 10_000_000 + ">"

    limits = LIMITS._replace(max_tool_output_chars=100)
    policy = ChatPolicy(calls(("flood", {})), "Enough.")
    result = await play(ToolAgentLoop, policy, [flood], limits=limits)
    (content,) = [one.content for one in result.messages if one.role == "tool"]
    assert content.startswith("<x")
    assert content.endswith("x>")
    assert "[... 9999902 characters are left out here ...]" in content
    assert content.count("x") == 98
    assert result.metrics["num_cut_tool_outputs"] == 1


@pytest.mark.parametrize(("limit", "num_chars"), [(300, 300), (LoopArgs().max_tool_output_chars, 3000)])
async def test_an_output_within_the_limit_is_whole(limit: int, num_chars: int) -> None:
    @tool
    def page() -> str:
        """A page of text."""
        return "y" * num_chars

    limits = LIMITS._replace(max_tool_output_chars=limit)
    policy = ChatPolicy(calls(("page", {})), "Ok.")
    result = await play(ToolAgentLoop, policy, [page], limits=limits)
    (content,) = [one.content for one in result.messages if one.role == "tool"]
    assert content == "y" * num_chars
    assert "num_cut_tool_outputs" not in result.metrics


async def test_a_tool_that_never_answers_costs_its_timeout_only() -> None:
    @tool
    async def hang() -> str:
        """Never."""
        await asyncio.Event().wait()
        return ""

    limits = LIMITS._replace(tool_timeout_s=0.05)
    result = await play(ToolAgentLoop, ChatPolicy(calls(("hang", {})), "Well."), [hang], limits=limits)
    assert result.outcome is Outcome.OK
    assert result.metrics["num_tool_errors"] == 1


async def test_an_episode_has_only_so_much_time_for_tools() -> None:
    @tool
    async def hang() -> str:
        """Never."""
        await asyncio.Event().wait()
        return ""

    limits = LIMITS._replace(max_tool_s=0.05)
    policy = ChatPolicy(calls(("hang", {})), calls(("hang", {})), "Well.")
    result = await play(ToolAgentLoop, policy, [hang], limits=limits)
    last = [one.content for one in result.messages if one.role == "tool"][-1]
    assert "0.05 s" in last
    assert "used up" in last
    assert result.outcome is Outcome.OK


async def test_a_row_without_tools_calls_none() -> None:
    policy = ChatPolicy(calls(say("a")), "Fine.")
    result = await play(ToolAgentLoop, policy, [echo], row={"tools": []})
    assert "tools" not in policy.prompts[0]
    assert "no tool" in next(one.content for one in result.messages if one.role == "tool")
