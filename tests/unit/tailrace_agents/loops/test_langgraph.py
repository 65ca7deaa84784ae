"""Graphs of LangGraph as agent loops."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tailrace_protos.episode import Outcome
from tests.unit.tailrace_agents.loops.world import ChatPolicy, play

pytest.importorskip("langgraph", reason="the package langgraph is not installed")

from langgraph.graph import START, MessagesState, StateGraph

from tailrace.sdk.langchain import LangGraphAgentLoop


class Plain(LangGraphAgentLoop):
    """A graph of one node, a plain function, which LangGraph runs in a thread."""

    def graph(self, model: Any, row: dict[str, Any]) -> Any:
        def ask(state: MessagesState) -> dict[str, Any]:
            return {"messages": [model.invoke(state["messages"])]}

        graph = StateGraph(MessagesState)
        graph.add_node("ask", ask)
        graph.add_edge(START, "ask")
        return graph.compile()

    def reward(self, row: dict[str, Any], state: dict[str, Any]) -> float:
        return float(state["messages"][-1].text)


async def test_a_plain_node_asks_the_model_from_its_thread() -> None:
    result = await play(Plain, ChatPolicy("0.5"))
    assert (result.outcome, result.transcript.turn_rewards) == (Outcome.OK, (0.5,))


async def test_the_call_of_a_thread_ends_with_its_episode() -> None:
    ended = asyncio.Event()

    async def never() -> str:
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()
        return ""

    result = await play(Plain, ChatPolicy(never), deadline_s=0.3)
    assert result.outcome is Outcome.TIMEOUT
    await asyncio.wait_for(ended.wait(), 10)
