"""A LangGraph agent with a tool, in two forms: as a workflow over HTTP, and as an agent loop.

Their reward is the share of digits in the last answer.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from langchain_core.language_models import BaseChatModel
from langchain_core.tools import tool
from langgraph.errors import GraphRecursionError
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.graph.state import CompiledStateGraph
from langgraph.prebuilt import ToolNode, tools_condition

from tailrace import PolicyFailureError
from tailrace.sdk.langchain import ChatTailrace, LangGraphAgentLoop


@tool
def double(number: int) -> int:
    """Twice a number."""
    return 2 * number


def build(model: BaseChatModel) -> CompiledStateGraph[Any, Any, Any, Any]:
    """Builds the graph: model, then its tool calls, repeated until it calls none."""
    bound = model.bind_tools([double])

    async def ask(state: MessagesState) -> dict[str, Any]:
        return {"messages": [await bound.ainvoke(state["messages"])]}

    graph = StateGraph(MessagesState)
    graph.add_node("ask", ask)
    graph.add_node("tools", ToolNode([double]))
    graph.add_edge(START, "ask")
    graph.add_conditional_edges("ask", tools_condition)
    graph.add_edge("tools", "ask")
    return graph.compile()


class GraphWorkflow:
    """Plays one row through the gateway."""

    async def run(
        self, data: dict[str, Any], *, base_url: str, api_key: str, http_client: Any
    ) -> dict[str, float]:
        """The reward of the last answer, by its message's id."""
        model = ChatTailrace(base_url=base_url, api_key=api_key, http_client=http_client, max_tokens=64)
        state = {"messages": [("user", data["prompt"])]}
        try:
            final = await build(model).ainvoke(state, {"recursion_limit": 12})
        except GraphRecursionError as error:
            raise PolicyFailureError("it calls tools for ever") from error
        last = final["messages"][-1]
        return {last.id: digit_share(last.text)}


class GraphLoop(LangGraphAgentLoop):
    """Plays one row inside the agents service, without HTTP."""

    def graph(self, model: BaseChatModel, row: dict[str, Any]) -> Any:
        """The same graph."""
        return build(model)

    def reward(self, row: dict[str, Any], state: dict[str, Any]) -> float:
        """The reward of the last answer."""
        return digit_share(state["messages"][-1].text)


def digit_share(answer: str) -> float:
    """The share of digits among the characters of an answer."""
    return sum(char.isdigit() for char in answer) / max(len(answer), 1)


def rows(split: str) -> Iterator[dict[str, Any]]:
    """The data set: eight prompts."""
    for number in range(8):
        yield {"prompt": f"Twice {number}?", "agent_name": "graph_loop"}
