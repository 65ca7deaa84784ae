"""Finds the recorded call that a conversation continues: by its messages, or by its tokens."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from tailrace.ledger.identity import is_same_message, is_same_reasoning
from tailrace.ledger.tree import Call, CallTree
from tailrace_protos.chat import ChatMessage


class Match(NamedTuple):
    """The deepest call that the conversation goes through; `num` messages or bytes are its own.

    `has_reasoning`: the caller still knows the thoughts of all replies that it goes through.
    """

    call: Call | None = None
    num: int = 0
    has_reasoning: bool = True


def match_messages(tree: CallTree, messages: Sequence[ChatMessage]) -> Match:
    """By message identity. Thoughts that a client left out do not matter, changed ones do."""
    best = Match()
    open_matches = [best]
    while open_matches:
        match = open_matches.pop()
        if match.num > best.num:
            best = match
        children = match.call.children if match.call else tree.roots
        # reversed: of equally deep matches the first recorded one wins
        open_matches += _children_matches(match, reversed(children), messages)
    return best


def match_tokens(tree: CallTree, prompt: bytes) -> Match:
    """By exact prefix of ids, given as raw bytes."""
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
    """Whether the ids behind the match begin as a recorded prompt does and go on in another way.

    That is what a caller does who encodes a sampled reply anew.
    """
    rest = prompt[match.num :]
    return any(
        len(rest) > len(child.node.inserted_ids) and rest.startswith(bytes(child.node.inserted_ids))
        for child in _token_children(tree, match.call)
        if len(child.node.token_ids)
    )


def _token_children(tree: CallTree, call: Call | None) -> Iterable[Call]:
    if call is not None:
        return (child for child in call.children if not child.node.is_rendered_whole)
    return (child for child in tree if child.token_parent is None)


def _children_matches(
    match: Match, children: Iterable[Call], messages: Sequence[ChatMessage]
) -> Iterable[Match]:
    for child in children:
        node = child.node
        reply_at = match.num + len(node.messages)
        if reply_at >= len(messages) or not (node.messages or match.call):
            continue
        theirs = messages[reply_at]
        if not is_same_message(node.reply, theirs):
            continue
        has_reasoning = is_same_reasoning(node.reply, theirs)
        if theirs.reasoning and not has_reasoning:
            continue
        if all(map(is_same_message, node.messages, messages[match.num : reply_at])):
            yield Match(child, reply_at + 1, match.has_reasoning and has_reasoning)
