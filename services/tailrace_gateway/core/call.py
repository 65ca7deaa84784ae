"""Model call and its result, independent of the dialect."""

import enum
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from tailrace.chat import ReplyDelta
from tailrace_protos.chat import ChatMessage, ToolSchema
from tailrace_protos.generation import FinishReason, SamplingParams


class SamplingOverrides(msgspec.Struct, frozen=True, kw_only=True):
    """Sampling parameters that a request sets; None keeps the session's value."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()

    def applied_to(self, base: SamplingParams) -> SamplingParams:
        """Return the session's parameters with these values in place; stops are added."""
        fields = ("temperature", "top_p", "top_k", "min_p", "seed")
        given = {name: getattr(self, name) for name in fields if getattr(self, name) is not None}
        stop_ids = (*self.stop_token_ids, *base.stop_token_ids)
        stop = (*self.stop, *base.stop)
        return msgspec.structs.replace(base, stop=stop, stop_token_ids=stop_ids, **given)


class ReplyFormat(enum.Enum):
    """Format that a reply must have."""

    TEXT = "text"
    JSON_OBJECT = "json_object"
    JSON_SCHEMA = "json_schema"


class OutputConstraints(msgspec.Struct, frozen=True, kw_only=True):
    """Constraints on a finished reply. The gateway checks them, and guides the engine by them."""

    needs_tool_call: bool = False
    tool_name: str = ""  # every call must use this tool
    max_tool_calls: int | None = None
    reply_format: ReplyFormat = ReplyFormat.TEXT
    json_schema: dict[str, Any] | None = None
    format_param: str = "response_format"  # the field of the request with the format


class ItemReference(NamedTuple):
    """Reference to an item of an earlier answer, at `place` in the request."""

    item_id: str
    place: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCall:
    """One model call, independent of the dialect of its request.

    The prompt is either `messages`, or one or more `prompts`: ids [P], or text that the gateway encodes
    once.
    """

    messages: tuple[ChatMessage, ...] = ()
    items: tuple[ChatMessage | ItemReference, ...] = ()  # instead of `messages`, with references
    prompts: tuple[NDArray[np.int32] | str, ...] = ()
    previous_id: str = ""  # the call that `messages` continue
    has_new_system: bool = False  # the first of `messages` replaces the system message of that call
    tools: tuple[ToolSchema, ...] = ()
    finds_calls: bool = True  # False: tool calls in the reply are text
    template_args: dict[str, Any] = field(default_factory=dict)  # of the chat template
    num_choices: int = 1  # of each prompt
    max_new_tokens: int | None = None
    top_logprobs: int = 0  # number of alternative tokens per step
    sampling: SamplingOverrides = field(default_factory=SamplingOverrides)
    constraints: OutputConstraints = field(default_factory=OutputConstraints)

    @property
    def is_token_level(self) -> bool:
        """True if the prompt is tokens or plain text instead of a conversation."""
        return bool(self.prompts)


class StopReason(enum.Enum):
    """Reason why a choice ended."""

    STOP = "stop"
    LENGTH = "length"
    TOOL_CALLS = "tool_calls"


def stop_reason_of(message: ChatMessage, finish_reason: FinishReason | None) -> StopReason:
    """Return the reason why a choice ended, as clients see it."""
    if finish_reason is FinishReason.LENGTH:
        return StopReason.LENGTH
    return StopReason.TOOL_CALLS if message.tool_calls else StopReason.STOP


@dataclass(frozen=True, slots=True)
class ReplyChoice:
    """One sampled reply of a call."""

    index: int
    completion_id: str  # id of its node in the ledger
    message: ChatMessage
    stop_reason: StopReason
    stop_matched: str | None  # the stop string that ended the reply
    token_ids: NDArray[np.int32]  # [T]
    logprobs: NDArray[np.float32]  # [T]
    top_ids: NDArray[np.int32] | None = None  # [T, k], most likely first; None: not requested
    top_logprobs: NDArray[np.float32] | None = None  # [T, k]


@dataclass(frozen=True, slots=True)
class CallStart:
    """Facts of a call that are known before its first token."""

    completion_id: str
    created_unix_s: int
    prompts: tuple[NDArray[np.int32], ...]  # [P] ids of each prompt

    @property
    def num_prompt_tokens(self) -> int:
        """Number of tokens of all prompts."""
        return sum(map(len, self.prompts))


@dataclass(frozen=True, slots=True)
class Completion:
    """Result of a call with all its choices."""

    opening: CallStart
    choices: tuple[ReplyChoice, ...]
    num_cached_tokens: int

    @property
    def num_prompt_tokens(self) -> int:
        """Number of tokens of all prompts."""
        return self.opening.num_prompt_tokens

    def prompt_of(self, choice: ReplyChoice) -> NDArray[np.int32]:
        """Return the prompt [P] of a choice: each prompt has the same number of choices."""
        return self.opening.prompts[choice.index * len(self.opening.prompts) // len(self.choices)]

    @property
    def num_sampled(self) -> int:
        """Number of sampled tokens over all choices."""
        return sum(len(choice.token_ids) for choice in self.choices)


@dataclass(frozen=True, slots=True)
class Piece:
    """New tokens of a choice in flight, and the text that they complete."""

    index: int
    delta: ReplyDelta
    token_ids: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    top_ids: NDArray[np.int32] | None = None
    top_logprobs: NDArray[np.float32] | None = None
