"""Finds the recorded call that a conversation continues: by its messages, or by its tokens."""

from __future__ import annotations

from collections.abc import Iterable
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


def match_messages(tree: CallTree, messages: tuple[ChatMessage, ...]) -> Match:
    """By message identity. Thoughts that a client left out do not matter, changed ones do."""
    best = match = Match()
    open_matches = [match]
    while open_matches:
        match = open_matches.pop()
        if match.num > best.num:
            best = match
        children = match.call.children if match.call else tree.roots
        for child in reversed(children):  # of equally deep matches the first recorded one wins
            onward = _child_match(match, child, messages)
            if onward is not None:
                open_matches.append(onward)
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


def _child_match(match: Match, child: Call, messages: tuple[ChatMessage, ...]) -> Match | None:
    """The match that goes on through `child`, if the messages do."""
    node, begun = child.node, match.num
    inserted = node.messages
    reply_at = begun + len(inserted)
    if reply_at >= len(messages) or not (inserted or match.call):
        return None
    ours, theirs = node.reply, messages[reply_at]
    has_reasoning = match.has_reasoning
    if ours != theirs:  # equality costs a fraction of the closer look
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
