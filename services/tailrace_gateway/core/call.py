"""A model call free of any dialect, and what comes back of it."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from tailrace.chat import ReplyDelta
from tailrace_protos.chat import ChatMessage, ToolSchema
from tailrace_protos.generation import FinishReason, SamplingParams


class SamplingOverrides(msgspec.Struct, frozen=True, kw_only=True):
    """What a request says of sampling; None: as the session says."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: tuple[str, ...] = ()

    def applied_to(self, base: SamplingParams) -> SamplingParams:
        """The session's parameters with the wishes in their place; stop strings come on top of it"""
        fields = ("temperature", "top_p", "top_k", "min_p", "seed")
        said = {name: getattr(self, name) for name in fields if getattr(self, name) is not None}
        return msgspec.structs.replace(base, stop=(*self.stop, *base.stop), **said)


class ReplyFormat(enum.Enum):
    """What the text of a reply has to be."""

    TEXT = "text"
    JSON_OBJECT = "json_object"
    JSON_SCHEMA = "json_schema"


class OutputConstraints(msgspec.Struct, frozen=True, kw_only=True):
    """What a finished reply is checked against; nothing forces the model to keep it."""

    needs_tool_call: bool = False
    forbids_tool_calls: bool = False
    tool_name: str = ""  # every call has to be of this tool
    max_tool_calls: int | None = None
    reply_format: ReplyFormat = ReplyFormat.TEXT
    json_schema: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCall:
    """What a request asks of the model, whichever dialect it was written in.

    Either `messages` or `prompt_ids` [P] (or `prompt_text`, encoded once) is the prompt.
    """

    messages: tuple[ChatMessage, ...] = ()
    prompt_ids: NDArray[np.int32] | None = None
    prompt_text: str = ""
    previous_id: str = ""  # continue the conversation of this call with `messages`
    tools: tuple[ToolSchema, ...] = ()
    num_choices: int = 1
    max_new_tokens: int | None = None
    top_logprobs: int = 0  # likeliest tokens to tell of each step
    sampling: SamplingOverrides = field(default_factory=SamplingOverrides)
    constraints: OutputConstraints = field(default_factory=OutputConstraints)

    @property
    def is_token_level(self) -> bool:
        """Whether the prompt is tokens or bare text, no conversation."""
        return not self.messages and not self.previous_id


class StopReason(enum.Enum):
    """Why a choice ended."""

    STOP = "stop"
    LENGTH = "length"
    TOOL_CALLS = "tool_calls"


def stop_reason_of(message: ChatMessage, finish_reason: FinishReason | None) -> StopReason:
    """Why a choice ended, as clients are told."""
    if finish_reason is FinishReason.LENGTH:
        return StopReason.LENGTH
    return StopReason.TOOL_CALLS if message.tool_calls else StopReason.STOP


@dataclass(frozen=True, slots=True)
class ReplyChoice:
    """One sampled reply."""

    index: int
    completion_id: str  # its node in the ledger
    message: ChatMessage
    stop_reason: StopReason
    stop_matched: str | None  # the stop string that ended it
    token_ids: NDArray[np.int32]  # [T]
    logprobs: NDArray[np.float32]  # [T]
    top_ids: NDArray[np.int32] | None = None  # [T, k], the likeliest first; None: not asked for
    top_logprobs: NDArray[np.float32] | None = None  # [T, k]


@dataclass(frozen=True, slots=True)
class CallStart:
    """What is known of a call before its first token."""

    completion_id: str
    created_unix_s: int
    prompt_ids: NDArray[np.int32]  # [P]


@dataclass(frozen=True, slots=True)
class Completion:
    """All choices of a call."""

    opening: CallStart
    choices: tuple[ReplyChoice, ...]
    num_cached_tokens: int

    @property
    def num_prompt_tokens(self) -> int:
        """P."""
        return len(self.opening.prompt_ids)

    @property
    def num_sampled(self) -> int:
        """Over all choices."""
        return sum(len(choice.token_ids) for choice in self.choices)


@dataclass(frozen=True, slots=True)
class Piece:
    """Some new tokens of a choice that is still being sampled, and the text that became certain."""

    index: int
    delta: ReplyDelta
    token_ids: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    top_ids: NDArray[np.int32] | None = None
    top_logprobs: NDArray[np.float32] | None = None
