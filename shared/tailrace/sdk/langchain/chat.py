"""`ChatTailrace`: LangChain's chat model over the gateway."""

import os
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import Any

import openai
from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun
from langchain_core.language_models import BaseChatModel, LanguageModelInput
from langchain_core.messages import AIMessage, BaseMessage
from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, ChatResult
from langchain_core.runnables import Runnable
from langchain_core.tools import BaseTool
from langchain_core.utils.function_calling import convert_to_openai_tool
from pydantic import Field, PrivateAttr, SecretStr

from tailrace.sdk.langchain.messages import (
    to_chunk,
    to_message,
    to_openai,
    to_tool_choice,
    to_usage,
)

ToolLike = dict[str, Any] | type | Callable[..., Any] | BaseTool


class ToolBindingModel(BaseChatModel):
    """Base of both chat models."""

    def bind_tools(
        self,
        tools: Sequence[ToolLike],
        *,
        tool_choice: Any = None,
        **kwargs: Any,
    ) -> Runnable[LanguageModelInput, AIMessage]:
        """Adds tools to the model. `tool_choice`: `auto`, `none`, `any` or a tool's name."""
        bound: dict[str, Any] = {"tools": [convert_to_openai_tool(tool) for tool in tools], **kwargs}
        if tool_choice is not None:
            bound["tool_choice"] = to_tool_choice(tool_choice)
        return self.bind(**bound)


class ChatTailrace(ToolBindingModel):
    """The model that is trained, as LangChain sees it.

    `base_url` and `api_key` are those that a workflow is given (default: `OPENAI_BASE_URL` and
    `OPENAI_API_KEY`), and so is `http_client`, for asynchronous calls. The id of a message is the id of
    its completion: return it from a workflow as the key of a reward.
    """

    base_url: str = Field(default_factory=lambda: os.environ.get("OPENAI_BASE_URL", ""))
    api_key: SecretStr = Field(default_factory=lambda: SecretStr(os.environ.get("OPENAI_API_KEY", "")))
    http_client: Any = Field(default=None, exclude=True)
    model: str = "policy"
    temperature: float | None = None
    top_p: float | None = None
    max_tokens: int | None = None
    seed: int | None = None
    stop: list[str] | None = None
    timeout_s: float | None = None
    max_retries: int = 2

    _client: openai.OpenAI | None = PrivateAttr(default=None)
    _async_client: openai.AsyncOpenAI | None = PrivateAttr(default=None)

    @property
    def _llm_type(self) -> str:
        return "tailrace"

    @property
    def _identifying_params(self) -> dict[str, Any]:
        return {"model": self.model, "base_url": self.base_url, **self._sampling()}

    def _sampling(self) -> dict[str, Any]:
        chosen = {
            "temperature": self.temperature,
            "top_p": self.top_p,
            "max_completion_tokens": self.max_tokens,
            "seed": self.seed,
        }
        return {key: value for key, value in chosen.items() if value is not None}

    def _request(
        self, messages: list[BaseMessage], stop: list[str] | None, kwargs: dict[str, Any]
    ) -> dict[str, Any]:
        if "max_tokens" in kwargs:
            kwargs["max_completion_tokens"] = kwargs.pop("max_tokens")
        request = {"model": self.model, "messages": to_openai(messages), **self._sampling(), **kwargs}
        stops = stop or self.stop
        return {**request, "stop": stops} if stops else request

    def _settings(self) -> dict[str, Any]:
        return {
            "base_url": self.base_url,
            "api_key": self.api_key.get_secret_value(),
            "timeout": self.timeout_s,
            "max_retries": self.max_retries,
        }

    def _sync(self) -> openai.OpenAI:
        if self._client is None:
            self._client = openai.OpenAI(**self._settings())
        return self._client

    def _async(self) -> openai.AsyncOpenAI:
        if self._async_client is None:
            self._async_client = openai.AsyncOpenAI(**self._settings(), http_client=self.http_client)
        return self._async_client

    def _generate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        return _result(
            self._sync().chat.completions.create(**self._request(messages, stop, kwargs)).model_dump()
        )

    async def _agenerate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        request = self._request(messages, stop, kwargs)
        completion = await self._async().chat.completions.create(**request)
        return _result(completion.model_dump())

    def _stream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> Iterator[ChatGenerationChunk]:
        request = {**self._request(messages, stop, kwargs), **_STREAMED}
        with self._sync().chat.completions.create(**request) as stream:
            for event in stream:
                chunk = _chunk(event.model_dump())
                if run_manager is not None:
                    run_manager.on_llm_new_token(chunk.text, chunk=chunk)
                yield chunk

    async def _astream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> AsyncIterator[ChatGenerationChunk]:
        request = {**self._request(messages, stop, kwargs), **_STREAMED}
        async with await self._async().chat.completions.create(**request) as stream:
            async for event in stream:
                chunk = _chunk(event.model_dump())
                if run_manager is not None:
                    await run_manager.on_llm_new_token(chunk.text, chunk=chunk)
                yield chunk


_STREAMED = {"stream": True, "stream_options": {"include_usage": True}}


def _result(completion: dict[str, Any]) -> ChatResult:
    usage = to_usage(completion["usage"])
    generations = []
    for choice in completion["choices"]:
        metadata = {
            "finish_reason": choice["finish_reason"],
            "model_name": completion["model"],
            "logprobs": choice.get("logprobs"),
        }
        index = choice["index"]  # further choices are completions of their own in the ledger
        completion_id = f"{completion['id']}-{index}" if index else completion["id"]
        message = to_message(choice["message"], completion_id, usage, metadata)
        generations.append(ChatGeneration(message=message, generation_info=metadata))
    return ChatResult(generations=generations, llm_output={"model_name": completion["model"]})


def _chunk(event: dict[str, Any]) -> ChatGenerationChunk:
    """Converts a streamed piece; the last one has the usage and no choice."""
    choices = event["choices"]
    choice = choices[0] if choices else {"delta": {}, "finish_reason": None}
    metadata: dict[str, Any] = {}
    if choice["finish_reason"]:
        metadata = {"finish_reason": choice["finish_reason"], "model_name": event["model"]}
    message = to_chunk(choice["delta"], event["id"], metadata)
    message.usage_metadata = to_usage(event.get("usage"))
    return ChatGenerationChunk(message=message, generation_info=metadata or None)
