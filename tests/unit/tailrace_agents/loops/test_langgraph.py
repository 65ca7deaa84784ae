"""Graphs of LangGraph as agent loops."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest

from tailrace_protos.episode import Outcome
from tests.unit.tailrace_agents.loops.world import ChatPolicy, play

pytest.importorskip("langgraph", reason="the package langgraph is not installed")

from langgraph.graph import START, MessagesState, StateGraph

from tailrace.sdk.langchain import LangGraphAgentLoop, loop


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


class Endless:
    """A reply that never comes; the time of its episode is over as it is asked for."""

    def __init__(self, jump_ahead: Callable[[float], None]) -> None:
        self.ended = asyncio.Event()
        self._jump_ahead = jump_ahead

    async def __call__(self) -> str:
        self._jump_ahead(61.0)
        try:
            await asyncio.Event().wait()
        finally:
            self.ended.set()
        return ""


async def test_the_call_of_a_thread_ends_with_its_episode(
    jump_ahead: Callable[[float], None],
) -> None:
    endless = Endless(jump_ahead)
    result = await play(Plain, ChatPolicy(endless), deadline_s=60.0)
    assert result.outcome is Outcome.TIMEOUT
    await endless.ended.wait()


async def test_a_call_that_the_end_of_its_episode_overtakes_ends_too(
    jump_ahead: Callable[[float], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    endless, is_over = Endless(jump_ahead), threading.Event()
    hand_over = asyncio.run_coroutine_threadsafe

    def late(*args: Any) -> Any:
        """Returns, in the node's thread, only after the end of the episode."""
        call = hand_over(*args)
        is_over.wait(60.0)
        return call

    monkeypatch.setattr(loop.asyncio, "run_coroutine_threadsafe", late)
    result = await play(Plain, ChatPolicy(endless), deadline_s=60.0)
    assert result.outcome is Outcome.TIMEOUT
    is_over.set()
    await endless.ended.wait()
