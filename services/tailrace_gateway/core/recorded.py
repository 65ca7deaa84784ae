"""Answers that were given: written down beside the nodes of the ledger, and read from there."""

from __future__ import annotations

from collections.abc import Sequence

from tailrace.channel.tops import as_tops
from tailrace.chat import ReplyDelta
from tailrace_gateway.core.call import Choice, Completion, Opening, Piece
from tailrace_gateway.core.replies import ending_of
from tailrace_gateway.core.running import RunningCall
from tailrace_gateway.core.session import Session
from tailrace_protos.base import (
    EMPTY,
    Float32Bytes,
    Int32Bytes,
    as_float32,
    as_int32,
    decode,
    encode,
    pack_float32,
    pack_int32,
)
from tailrace_protos.session import LedgerNode, RecordedAnswer


def answer_of(completion: Completion) -> bytes:
    """The record of an answer; its words are in the ledger."""
    return encode(
        RecordedAnswer(
            completion.opening.completion_id,
            completion.opening.created_unix_s,
            tuple(choice.completion_id for choice in completion.choices),
            tuple(choice.stop_matched for choice in completion.choices),
            completion.num_prompt_tokens,
            completion.num_cached_tokens,
            *_packed_tops(completion.choices),
        )
    )


def _packed_tops(
    choices: Sequence[Choice],
) -> tuple[tuple[Int32Bytes, ...], tuple[Float32Bytes, ...]]:
    """`top_ids` and `top_logprobs` of every choice; nothing where nobody asked for them."""
    ids = [one.top_ids for one in choices]
    logprobs = [one.top_logprobs for one in choices]
    if all(one is None for one in ids):
        return (), ()
    return (
        tuple(EMPTY if one is None else pack_int32(one.ravel()) for one in ids),
        tuple(EMPTY if one is None else pack_float32(one.ravel()) for one in logprobs),
    )


def completion_of(answer: bytes, session: Session, running: RunningCall) -> Completion:
    """The answer again, told to whoever follows `running`."""
    recorded = decode(answer, RecordedAnswer)
    nodes = [session.node(node_id) for node_id in recorded.node_ids]
    prompt_ids = session.prompt_ids(recorded.node_ids[0])
    opening = Opening(recorded.completion_id, recorded.created_unix_s, prompt_ids)
    running.open(opening)
    choices = tuple(_choice(index, node, recorded) for index, node in enumerate(nodes))
    for choice in choices:
        said = ReplyDelta(choice.message.content, choice.message.reasoning)
        tops = choice.top_ids, choice.top_logprobs
        running.say(Piece(choice.index, said, choice.token_ids, choice.logprobs, *tops))
    return Completion(opening, choices, recorded.num_cached_tokens)


def _choice(index: int, node: LedgerNode, recorded: RecordedAnswer) -> Choice:
    token_ids = as_int32(node.token_ids)
    top_ids, top_logprobs = (
        as_tops(recorded.top_ids[index], recorded.top_logprobs[index], len(token_ids))
        if recorded.top_ids
        else (None, None)
    )
    return Choice(
        index,
        node.completion_id,
        node.reply,
        ending_of(node.reply, node.finish_reason),
        recorded.stops_matched[index],
        token_ids,
        as_float32(node.inference_logprobs),
        top_ids,
        top_logprobs,
    )
