"""From a conversation to the tokens that it is asked with: continue a recorded call, or begin anew.

A recorded call is continued if its messages are the conversation's, its tools are the same, the
template can be appended to and, with `reasoning: fork`, nobody drops thoughts. Otherwise all is
rendered anew; then the call continues its parent's messages, for returns, but not its tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from tailrace.chat import Renderer, TemplateNotAppendableError
from tailrace.config.chat import ReasoningPolicy
from tailrace.ledger.matching import Match, is_rewritten, match_messages, match_tokens
from tailrace.ledger.prompt import Prompt
from tailrace.ledger.tree import Call, CallTree
from tailrace_protos.base import as_int32
from tailrace_protos.chat import ChatMessage, ToolSchema


def prompt_of_messages(
    tree: CallTree,
    renderer: Renderer,
    reasoning: ReasoningPolicy,
    messages: tuple[ChatMessage, ...],
    tools: tuple[ToolSchema, ...],
) -> Prompt:
    """The prompt of a conversation given as text; raises `TemplateError` if it cannot be rendered."""
    match = match_messages(tree, messages)
    new = messages[match.num :]
    has_foreign_reply = any(message.role == "assistant" for message in new)
    if match.call is None:
        ids = renderer.opening_ids(messages, tools)
        return Prompt("", new, ids, ids, has_foreign_reply and len(tree) > 0, tools)
    parent_id = match.call.node.completion_id
    inserted = _continued(match, renderer, reasoning, messages, tools)
    if inserted is None:
        ids = renderer.opening_ids(messages, tools)
        return Prompt(parent_id, new, ids, ids, True, tools, is_rendered_whole=True)
    whole = _joined(match.call.sequence(), inserted)
    return Prompt(parent_id, new, inserted, whole, has_foreign_reply, tools)


def prompt_of_tokens(
    tree: CallTree, prompt_ids: NDArray[np.int32], messages: tuple[ChatMessage, ...]
) -> Prompt:
    """The prompt of a caller that keeps tokens himself."""
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


def _continued(
    match: Match,
    renderer: Renderer,
    reasoning: ReasoningPolicy,
    messages: Sequence[ChatMessage],
    tools: tuple[ToolSchema, ...],
) -> NDArray[np.int32] | None:
    """The ids to append to the matched call's; None if its tokens cannot be continued."""
    call = match.call
    assert call is not None
    if call.node.tools != tools:
        return None
    # The recorded reply, not the client's copy of it: the same by identity, with its thoughts.
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
    """Whether neither the client nor the template drops thoughts that the tokens still hold."""
    assert match.call is not None
    thinks = any(call.node.reply.reasoning for call in match.call.token_path())
    return not thinks or (match.has_reasoning and renderer.keeps_reasoning(history, new, tools))


def _last_id(call: Call) -> int | None:
    """The newest sampled id of a call; None if it sampled nothing."""
    sampled = as_int32(call.node.token_ids)
    return int(sampled[-1]) if len(sampled) else None


def _joined(before: bytes, inserted: NDArray[np.int32]) -> NDArray[np.int32]:
    return as_int32(memoryview(before + inserted.tobytes()))
