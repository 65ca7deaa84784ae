"""LangChain and LangGraph: a chat model for agents, and an agent loop that runs a graph."""

from tailrace.sdk.langchain.chat import ChatTailrace
from tailrace.sdk.langchain.loop import LangGraphAgentLoop, PolicyChatModel

__all__ = ["ChatTailrace", "LangGraphAgentLoop", "PolicyChatModel"]
