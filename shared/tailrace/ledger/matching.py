"""Finds the recorded call that a conversation continues, by its messages or by its tokens.

Two messages are the same if role, content, canonical tool calls and the answered call agree. Arguments
of tool calls are compared as JSON values: the order of keys, white space and the spelling of numbers
do not matter (JavaScript writes 2.0 as 2), ids of tool calls do. White space around a reply does not
matter: clients strip it. Reasoning is compared apart.
"""

import json
from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import NamedTuple

from tailrace.ledger.tree import Call, CallTree
from tailrace_protos.chat import ChatMessage, ToolCall


class Match(NamedTuple):
    """Deepest call on the conversation's path; so many (`num`) of its messages or bytes are recorded.

    `has_reasoning`: the caller still has the reasoning of all replies on that path.
    """

    call: Call | None = None
    num: int = 0
    has_reasoning: bool = True


def match_messages(
    tree: CallTree,
    messages: tuple[ChatMessage, ...],
    is_alike: Callable[[Call], bool] = lambda call: True,
) -> Match:
    """Matches by message identity. Missing reasoning is ignored; changed reasoning is not.

    Of equally deep matches the first recorded call wins that `is_alike`, whose tokens can go on.
    """
    best = match = Match()
    open_matches = [match]
    while open_matches:
        match = open_matches.pop()
        if match.num > best.num or (
            match.call
            and best.call
            and match.num == best.num
            and is_alike(match.call)
            and not is_alike(best.call)
        ):
            best = match
        for child in reversed(tree.children(match.call)):
            onward = _child_match(match, child, messages)
            if onward is not None:
                open_matches.append(onward)
    return best


def match_tokens(tree: CallTree, prompt: bytes) -> Match:
    """Matches by exact prefix of ids, given as raw bytes."""
    best = Match()
    open_matches = [best]
    while open_matches:
        match = open_matches.pop()
        if match.num > best.num:
            best = match
        for child in _token_children(tree, match.call):
            if not len(child.node.token_ids):
                continue
            begun = match.num + len(child.node.inserted_ids)
            end = begun + len(child.node.token_ids)
            if (
                prompt[match.num : begun] == child.node.inserted_ids
                and prompt[begun:end] == child.node.token_ids
            ):
                open_matches.append(Match(child, end))
    return best


def is_rewritten(tree: CallTree, match: Match, prompt: bytes) -> bool:
    """Detects a reply that was encoded again: after a recorded prompt, the ids differ."""
    rest = prompt[match.num :]
    return any(
        len(rest) > len(child.node.inserted_ids) and rest.startswith(bytes(child.node.inserted_ids))
        for child in _token_children(tree, match.call)
        if len(child.node.token_ids)
    )


def _token_children(tree: CallTree, call: Call | None) -> Iterable[Call]:
    if call is not None:
        return (child for child in tree.children(call) if not child.node.is_rendered_whole)
    return (child for child in tree if child.token_parent is None)


def _child_match(match: Match, child: Call, messages: tuple[ChatMessage, ...]) -> Match | None:
    """Extends the match by `child` if the messages continue through it."""
    node, begun = child.node, match.num
    inserted = node.messages
    reply_at = begun + len(inserted)
    if reply_at >= len(messages) or not (inserted or match.call):
        return None
    ours, theirs = node.reply, messages[reply_at]
    has_reasoning = match.has_reasoning
    if ours != theirs:  # equality costs a fraction of the comparison below
        if not is_same_message(ours, theirs):
            return None
        if not is_same_reasoning(ours, theirs):
            if theirs.reasoning:
                return None
            has_reasoning = False
    new = messages[begun:reply_at]
    if new != inserted and not all(map(is_same_message, inserted, new)):
        return None
    return Match(child, reply_at + 1, has_reasoning)


def is_same_message(ours: ChatMessage, theirs: ChatMessage) -> bool:
    """Compares a client's message with the recorded one; ignores reasoning and the tool's name."""
    if ours == theirs:
        return True
    if ours.role != theirs.role or ours.tool_call_id != theirs.tool_call_id:
        return False
    if ours.role == "assistant":
        return ours.content.strip() == theirs.content.strip() and _is_same_calls(
            ours.tool_calls, theirs.tool_calls
        )
    return ours.content == theirs.content and _is_same_calls(ours.tool_calls, theirs.tool_calls)


def is_same_reasoning(ours: ChatMessage, theirs: ChatMessage) -> bool:
    """Compares the reasoning, without white space around it."""
    return ours.reasoning.strip() == theirs.reasoning.strip()


def _is_same_calls(ours: tuple[ToolCall, ...], theirs: tuple[ToolCall, ...]) -> bool:
    return len(ours) == len(theirs) and all(
        our.id == their.id
        and our.name == their.name
        and (
            our.arguments == their.arguments
            or canonical_arguments(our.arguments) == canonical_arguments(their.arguments)
        )
        for our, their in zip(ours, theirs, strict=True)
    )


@lru_cache(1024)
def canonical_arguments(arguments: str) -> str:
    """Renders JSON with sorted keys, no white space and all numbers as floats.

    Other text stays; no text is an empty dict.
    """
    try:
        values = json.loads(arguments or "{}", parse_int=_number, parse_float=_number)
        return json.dumps(values, sort_keys=True, separators=(",", ":"))
    except (RecursionError, ValueError):
        return arguments.strip()


def _number(text: str) -> float:
    """Value of a number as JavaScript reads it; -0 is 0."""
    return float(text) + 0.0
