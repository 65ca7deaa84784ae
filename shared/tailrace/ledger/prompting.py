"""Prompts of calls: the tokens that continue a recorded call, or that begin a conversation.

A conversation given as text continues a recorded call if its messages are the conversation's, its tools
and template arguments are the same, the template can be appended to and, with `reasoning: fork`, no
reasoning is dropped. Otherwise the template renders all messages anew: then the call continues its
parent's messages, for returns, but not its tokens.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from tailrace.chat import Renderer, TemplateNotAppendableError
from tailrace.config.run import ReasoningPolicy
from tailrace.ledger.matching import Match, is_rewritten, match_messages, match_tokens
from tailrace.ledger.tree import Call, CallTree
from tailrace_protos.base import as_int32
from tailrace_protos.chat import ChatMessage, ToolSchema
from tailrace_protos.generation import FinishReason, TokenSpan


class Prompt(NamedTuple):
    """Prompt of one call: `prompt_ids` go to the engine, the whole prompt to `Ledger.record`.

    `is_rendered_whole`: it continues the parent's messages, but none of its tokens.
    `is_fork`: text of a reply was inserted instead of its tokens, or all messages were rendered anew.
    """

    parent_id: str  # empty: a conversation begins here
    messages: tuple[ChatMessage, ...]  # the new ones
    inserted_ids: NDArray[np.int32]  # [o]
    prompt_ids: NDArray[np.int32]  # [P] all tokens; its last o are `inserted_ids`
    is_fork: bool
    tools: tuple[ToolSchema, ...] = ()
    is_rendered_whole: bool = False
    template_args: str = ""  # arguments of the template, if the call sets any


class Rendering(NamedTuple):
    """Renderer of a call, and the template arguments that it has beyond the run's."""

    renderer: Renderer
    template_args: str = ""


class Sampled(Protocol):
    """Answer of an engine, as `tailrace.channel` collects it; [t] tokens."""

    @property
    def token_ids(self) -> NDArray[np.int32]:
        """Ids [t]."""

    @property
    def inference_logprobs(self) -> NDArray[np.float32]:
        """Log-probabilities [t] of the ids."""

    @property
    def spans(self) -> tuple[TokenSpan, ...]:
        """Provenance of the ids; the numbers of tokens sum to t."""

    @property
    def finish_reason(self) -> FinishReason | None:
        """None if the call did not end by itself."""


def prompt_of_messages(
    tree: CallTree,
    rendering: Rendering,
    reasoning: ReasoningPolicy,
    messages: tuple[ChatMessage, ...],
    tools: tuple[ToolSchema, ...],
) -> Prompt:
    """Makes the prompt of a conversation given as text; raises `TemplateError` if rendering fails."""
    renderer, args = rendering
    match = match_messages(tree, messages, lambda call: _is_alike(call, tools, args))
    new = messages[match.num :]
    has_foreign_reply = any(message.role == "assistant" for message in new)
    if match.call is None:
        ids = renderer.opening_ids(messages, tools)
        is_fork = has_foreign_reply and len(tree) > 0
        return Prompt("", new, ids, ids, is_fork, tools, template_args=args)
    parent_id = match.call.node.completion_id
    inserted = None
    if _is_alike(match.call, tools, args):
        inserted = _continued(match, renderer, reasoning, messages, tools)
    if inserted is None:
        ids = renderer.opening_ids(messages, tools)
        return Prompt(parent_id, new, ids, ids, True, tools, True, args)
    whole = _joined(match.call.sequence(), inserted)
    return Prompt(parent_id, new, inserted, whole, has_foreign_reply, tools, template_args=args)


def prompt_of_tokens(
    tree: CallTree, prompt_ids: NDArray[np.int32], messages: tuple[ChatMessage, ...]
) -> Prompt:
    """Makes the prompt of a caller that keeps tokens itself, by a search for the longest prefix."""
    raw = np.ascontiguousarray(prompt_ids, dtype=np.int32).tobytes()
    match = match_tokens(tree, raw)
    ids = as_int32(memoryview(raw))
    return Prompt(
        match.call.node.completion_id if match.call else "",
        messages,
        ids[match.num // 4 :].copy(),
        ids,
        is_rewritten(tree, match, raw),
    )


def _is_alike(call: Call, tools: tuple[ToolSchema, ...], template_args: str) -> bool:
    """Checks that a call was rendered with these tools and template arguments."""
    return (call.node.tools, call.node.template_args) == (tools, template_args)


def _continued(
    match: Match,
    renderer: Renderer,
    reasoning: ReasoningPolicy,
    messages: Sequence[ChatMessage],
    tools: tuple[ToolSchema, ...],
) -> NDArray[np.int32] | None:
    """Returns the ids to append to the matched call's; None if its tokens cannot be continued."""
    call = match.call
    assert call is not None
    # The recorded reply replaces the client's copy of it, which may lack the reasoning.
    history = (*messages[: match.num - 1], call.node.reply)
    new = messages[match.num :]
    try:
        if reasoning == "fork" and not _keeps_thoughts(match, renderer, history, new, tools):
            return None
        last = _last_id(call)
        closed = last is not None and renderer.is_closed(last)
        return renderer.continuation_ids(history, new, tools, closed=closed)
    except TemplateNotAppendableError:
        return None


def _keeps_thoughts(
    match: Match,
    renderer: Renderer,
    history: Sequence[ChatMessage],
    new: Sequence[ChatMessage],
    tools: tuple[ToolSchema, ...],
) -> bool:
    """Checks that neither the client nor the template drops reasoning that the tokens still hold."""
    assert match.call is not None
    thinks = any(call.node.reply.reasoning for call in match.call.token_path())
    return not thinks or (match.has_reasoning and renderer.keeps_reasoning(history, new, tools))


def _last_id(call: Call) -> int | None:
    """Newest sampled id of a call; None if it sampled nothing."""
    sampled = as_int32(call.node.token_ids)
    return int(sampled[-1]) if len(sampled) else None


def _joined(before: bytes, inserted: NDArray[np.int32]) -> NDArray[np.int32]:
    return as_int32(memoryview(before + inserted.tobytes()))
