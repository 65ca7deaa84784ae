"""How conversations are rendered and replies read: the key `chat` of an experiment."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from tailrace.config.base import Config

ToolParserName = Literal[
    "auto",
    "hermes",
    "qwen3_coder",
    "llama3_json",
    "mistral",
    "deepseek",
    "gpt_oss",
    "pythonic",
    "none",
]
ReasoningParserName = Literal["auto", "think", "harmony", "none"]
ReasoningPolicy = Literal["keep", "fork"]


class ChatArgs(Config, frozen=True, kw_only=True):
    """The key `chat` of an experiment file."""

    tool_parser: ToolParserName = "auto"
    """The format in which the model writes tool calls. auto: what the chat template itself writes when
    it renders a call; none: replies are never searched for calls."""

    reasoning_parser: ReasoningParserName = "auto"
    """Where the model's thoughts stand in a reply. auto: harmony channels if the chat template has
    them, think if the template or the tokenizer knows `<think>`, else none."""

    reasoning: ReasoningPolicy = "keep"
    """When a client or the template drops the thoughts of an earlier reply. keep: the model goes on
    seeing the tokens that it sampled; fork: the conversation is rendered anew without the thoughts."""

    template_args: dict[str, Any] = msgspec.field(default_factory=dict)
    """Further names for the chat template, such as `enable_thinking: false`."""

    def __post_init__(self) -> None:
        if self.tool_parser == "gpt_oss" and self.reasoning_parser not in ("auto", "harmony"):
            raise ValueError(
                "chat.tool_parser gpt_oss reads harmony channels: "
                "set chat.reasoning_parser to harmony or auto"
            )
