"""`LangGraphAgentLoop`: an agent loop that runs a graph, with the policy as its chat model.

Nothing here speaks HTTP: the model's calls go straight to the episode's ledger, and calls whose answer
is in the journal are answered from there after a crash.
"""

import asyncio
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, BaseMessage
from langchain_core.outputs import ChatGeneration, ChatResult
from langchain_core.runnables import Runnable
from pydantic import Field, PrivateAttr

from tailrace.sdk.agent_loop import AgentLoop, ChatReply, EpisodeEnd, EpisodePolicy
from tailrace.sdk.langchain.chat import ToolBindingModel
from tailrace.sdk.langchain.messages import to_message, to_openai
from tailrace_protos.chat import ChatMessage, ToolCall, ToolSchema

_STEPS_PER_TURN = 10  # of a graph, at most: the policy ends episodes with too many turns itself


class LangGraphAgentLoop(AgentLoop):
    """Base class of loops that run a graph; name your class under `agents.agent_loops`."""

    def graph(self, model: BaseChatModel, row: dict[str, Any]) -> Runnable[Any, Any]:
        """Makes the compiled graph that plays `row` with `model`."""
        raise NotImplementedError(f"{type(self).__name__} has no graph()")

    def state(self, row: dict[str, Any]) -> dict[str, Any]:
        """Makes the initial state of the graph."""
        prompt = row["prompt"]
        return {"messages": [("user", prompt)] if isinstance(prompt, str) else list(prompt)}

    def reward(self, row: dict[str, Any], state: dict[str, Any]) -> float | Mapping[str, float] | None:
        """Returns the reward of the episode, or rewards by message id; None: the service decides."""
        return None

    async def run(self, row: dict[str, Any], policy: EpisodePolicy) -> EpisodeEnd:
        """See `AgentLoop`."""
        model = PolicyChatModel(policy=policy)
        config = {"recursion_limit": _STEPS_PER_TURN * (policy.limits.max_turns + 1)}
        try:
            state = await self.graph(model, row).ainvoke(self.state(row), config)  # type: ignore[arg-type]
        finally:
            model.cancel_calls()
        reward = self.reward(row, state)
        if not isinstance(reward, Mapping):
            return policy.finish(reward)
        for completion_id, value in reward.items():
            policy.set_reward(value, completion_id)
        return policy.finish()


class PolicyChatModel(ToolBindingModel):
    """An episode's policy as a chat model. It belongs to the event loop in which it was made."""

    policy: Any = Field(exclude=True)  # an `EpisodePolicy`

    _loop: asyncio.AbstractEventLoop = PrivateAttr()
    _thread_id: int = PrivateAttr()
    _calls: set[Future[ChatResult]] = PrivateAttr(default_factory=set)  # from other threads
    _is_over: bool = PrivateAttr(default=False)

    def model_post_init(self, context: Any, /) -> None:
        """Keeps the event loop for calls from other threads."""
        super().model_post_init(context)
        self._loop = asyncio.get_running_loop()
        self._thread_id = threading.get_ident()

    def cancel_calls(self) -> None:
        """Cancels all calls of nodes in threads, now and later: they outlive a cancelled graph."""
        self._is_over = True
        for call in tuple(self._calls):
            call.cancel()

    @property
    def _llm_type(self) -> str:
        return "tailrace-policy"

    def _generate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        """Serves nodes that are plain functions: LangGraph runs them in threads."""
        if threading.get_ident() == self._thread_id:
            raise RuntimeError("`invoke` would block the event loop it waits for: use `await ainvoke`")
        calling = self._agenerate(messages, stop, None, **kwargs)
        call = asyncio.run_coroutine_threadsafe(calling, self._loop)
        self._calls.add(call)
        try:
            if self._is_over:  # perhaps `cancel_calls` did not see this one
                call.cancel()
            return call.result()
        finally:
            self._calls.discard(call)

    async def _agenerate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        tools = _schemas(kwargs.pop("tools", ()))
        max_tokens = kwargs.pop("max_tokens", None)
        unknown = [*kwargs, *(["stop"] if stop else [])]
        if unknown:
            raise ValueError(
                f"{', '.join(unknown)}: an agent loop's model takes messages, tools and max_tokens; "
                "sampling is a matter of agents.generating_args"
            )
        asked = [_chat_message(message) for message in to_openai(messages)]
        reply = await self.policy.complete(asked, tools, max_new_tokens=max_tokens)
        return ChatResult(generations=[ChatGeneration(message=_message(reply))])


def _schemas(tools: Sequence[Mapping[str, Any]]) -> tuple[ToolSchema, ...]:
    return tuple(
        ToolSchema(
            tool["function"]["name"],
            tool["function"].get("description", ""),
            tool["function"].get("parameters", {"type": "object", "properties": {}}),
        )
        for tool in tools
    )


def _chat_message(message: Mapping[str, Any]) -> ChatMessage:
    return ChatMessage(
        role=message["role"],
        content=_text(message.get("content")),
        tool_calls=tuple(
            ToolCall(call["id"] or "", call["function"]["name"], call["function"]["arguments"])
            for call in message.get("tool_calls") or ()
        ),
        tool_call_id=message.get("tool_call_id") or "",
        name=message.get("name") or "",
        reasoning=message.get("reasoning_content") or "",
    )


def _text(content: Any) -> str:
    if isinstance(content, str):
        return content
    parts = [part for part in content or () if part.get("type") != "text"]
    if parts:
        raise ValueError(f"content of type {parts[0].get('type')!r}: the model reads text only")
    return "\n".join(part["text"] for part in content or ())


def _message(reply: ChatReply) -> AIMessage:
    from_openai = {
        "content": reply.message.content,
        "reasoning_content": reply.message.reasoning,
        "tool_calls": [
            {"id": call.id, "function": {"name": call.name, "arguments": call.arguments}}
            for call in reply.message.tool_calls
        ],
    }
    metadata = {"finish_reason": reply.finish_reason.value, "malformed": reply.malformed}
    return to_message(from_openai, reply.completion_id, None, metadata)
