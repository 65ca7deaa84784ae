"""Ledgers in few words: conversations of a small ChatML model, and nodes written out by hand."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count

import numpy as np
from numpy.typing import NDArray

from tailrace.channel.generation import Generation
from tailrace.ledger import Ledger, Prompt
from tailrace_protos.base import pack_float32, pack_int32
from tailrace_protos.chat import ChatMessage, ToolSchema
from tailrace_protos.generation import FinishReason, TokenSpan
from tailrace_protos.session import LedgerNode
from tests.unit.tailrace.chat.families import QWEN, encoded, renderer, tokenizer

_numbers = count()


def user(text: str) -> ChatMessage:
    return ChatMessage("user", text)


def assistant(text: str, reasoning: str = "") -> ChatMessage:
    return ChatMessage("assistant", text, reasoning=reasoning)


def new_ledger(reasoning: str = "keep") -> Ledger:
    return Ledger(renderer(QWEN), reasoning=reasoning)  # type: ignore[arg-type]


def sampled(reply: ChatMessage, policy_version: int = 0) -> Generation:
    """Token ids that an engine emits for this text."""
    ids = encoded(QWEN, QWEN.write(reply))
    spans = (TokenSpan(policy_version, "", len(ids)),)
    return Generation(ids, np.full(len(ids), -0.5, np.float32), spans, FinishReason.STOP, None, 0)


def say(
    ledger: Ledger,
    messages: Sequence[ChatMessage],
    reply: ChatMessage,
    completion_id: str = "",
    tools: Sequence[ToolSchema] = (),
) -> tuple[Prompt, ChatMessage]:
    """One call: what it was asked with and the reply as the client gets it."""
    prompt = ledger.prepare(messages, tools)
    generation = sampled(reply)
    parsed = renderer(QWEN).parse_reply(generation.token_ids, tools)
    ledger.record(prompt, generation, parsed, completion_id or f"call{next(_numbers)}")
    return prompt, parsed.message


def text(ids: NDArray[np.int32]) -> str:
    """Of ids, special tokens included."""
    return tokenizer(QWEN).decode(ids.tolist(), skip_special_tokens=False)


def node(
    completion_id: str,
    parent_id: str,
    inserted: Sequence[int],
    sampled_ids: Sequence[int],
    reward: float | None = None,
    *,
    policy_version: int = 0,
    logprobs: Sequence[float] = (),
    **more: object,
) -> LedgerNode:
    """A node of a tree drawn by hand; log-probabilities are -id/10 unless given."""
    fields: dict[str, object] = {
        "messages": (user(completion_id),),
        "reply": assistant(f"reply to {completion_id}"),
        "finish_reason": FinishReason.STOP,
        "spans": (TokenSpan(policy_version, "", len(sampled_ids)),),
        **more,
    }
    return LedgerNode(
        completion_id=completion_id,
        parent_id=parent_id,
        inserted_ids=pack_int32(list(inserted)),
        token_ids=pack_int32(list(sampled_ids)),
        inference_logprobs=pack_float32(list(logprobs) or [-token / 10 for token in sampled_ids]),
        reward=reward,
        **fields,  # type: ignore[arg-type]
    )


def ledger_of(*nodes: LedgerNode) -> Ledger:
    return Ledger.restore(renderer(QWEN), nodes)
