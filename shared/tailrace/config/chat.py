"""Key `chat` of an experiment: how conversations are rendered and replies are read."""

from typing import Any, Literal

import msgspec

from tailrace.config.base import Config

ReasoningPolicy = Literal["keep", "fork"]


class ChatArgs(Config, frozen=True, kw_only=True):
    """The key `chat` of an experiment file."""

    tool_parser: str = "auto"
    """Format in which the model writes tool calls: `hermes`, `qwen3_coder`, `llama3_json`, `mistral`,
    `deepseek`, `gpt_oss` (needs harmony channels), `pythonic`, or `module:Class` of your own. `auto`:
    the format in which the chat template renders a call. `none`: replies are not searched for calls."""

    reasoning_parser: str = "auto"
    """Format in which the model marks its thoughts: `think` (`<think>` tags), `harmony` (channels), or
    `module:Class` of your own. `auto`: harmony if the chat template has channels or the tool parser
    needs them, think if the template or the tokenizer has the tag `<think>`, else none. `none`: a whole
    reply is the answer."""

    reasoning: ReasoningPolicy = "keep"
    """Rule for thoughts of an earlier reply that a client or the template drops. keep: the model still
    sees the tokens that it sampled; fork: the conversation is rendered again without the thoughts."""

    template_args: dict[str, Any] = msgspec.field(default_factory=dict)
    """Further variables of the chat template, such as `enable_thinking: false`."""
