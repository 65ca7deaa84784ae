"""Answers that were given: written down beside the nodes of the ledger, and read from there."""

from __future__ import annotations

from tailrace.chat import ReplyDelta
from tailrace_gateway.core.call import Choice, Completion, Opening, Piece
from tailrace_gateway.core.replies import ending_of
from tailrace_gateway.core.running import RunningCall
from tailrace_gateway.core.session import Session
from tailrace_protos.base import as_float32, as_int32, decode, encode
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
        )
    )


def completion_of(answer: bytes, session: Session, running: RunningCall) -> Completion:
    """The answer again, told to whoever follows `running`."""
    recorded = decode(answer, RecordedAnswer)
    nodes = [session.node(node_id) for node_id in recorded.node_ids]
    prompt_ids = session.prompt_ids(recorded.node_ids[0])
    opening = Opening(recorded.completion_id, recorded.created_unix_s, prompt_ids)
    running.open(opening)
    choices = tuple(
        _choice(index, node, stop)
        for index, (node, stop) in enumerate(zip(nodes, recorded.stops_matched, strict=True))
    )
    for choice in choices:
        said = ReplyDelta(choice.message.content, choice.message.reasoning)
        running.say(Piece(choice.index, said, choice.token_ids, choice.logprobs))
    return Completion(opening, choices, recorded.num_cached_tokens)


def _choice(index: int, node: LedgerNode, stop_matched: str | None) -> Choice:
    return Choice(
        index,
        node.completion_id,
        node.reply,
        ending_of(node.reply, node.finish_reason),
        stop_matched,
        as_int32(node.token_ids),
        as_float32(node.inference_logprobs),
    )
