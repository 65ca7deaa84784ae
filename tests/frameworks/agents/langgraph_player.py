"""A LangGraph graph: model, then its tool calls, until it calls none."""

from typing import Any

from langchain_core.messages import SystemMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition
from task import SYSTEM, double, reward


class Player:
    """Plays one row."""

    async def run(self, data: dict[str, Any], *, base_url: str, api_key: str) -> float:
        tools = [tool(double)]
        model = ChatOpenAI(
            model="policy", base_url=base_url, api_key=api_key, streaming=data["stream"]
        ).bind_tools(tools)

        async def ask(state: MessagesState) -> dict[str, Any]:
            return {"messages": [await model.ainvoke([SystemMessage(SYSTEM), *state["messages"]])]}

        graph = StateGraph(MessagesState)
        graph.add_node("ask", ask)
        graph.add_node("tools", ToolNode(tools))
        graph.add_edge(START, "ask")
        graph.add_conditional_edges("ask", tools_condition)
        graph.add_edge("tools", "ask")
        final = await graph.compile().ainvoke({"messages": [("user", data["prompt"])]})
        return reward(final["messages"][-1].text)
