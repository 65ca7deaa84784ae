"""Capture of calls: writes the sampled tokens to the ledger and, with the answer, to the session's log.

One append stores the nodes and the answer record. If it fails or times out, the client still gets the
answer, and the nodes are masked: no replica trains on tokens that other replicas cannot see. The
session's next append brings them, since later calls may continue them. A retry reads the recorded
answer from the log. An append that has begun also ends if its call is cancelled.
"""

import asyncio
from collections.abc import Sequence
from typing import NamedTuple

from tailrace.channel.generation import Generation
from tailrace.channel.top_logprobs import as_top_logprobs
from tailrace.chat import ParsedReply, ReplyDelta
from tailrace.ledger import Prompt
from tailrace.log import get_logger
from tailrace.store.errors import StoreError
from tailrace_gateway import metrics
from tailrace_gateway.core.call import CallStart, Completion, Piece, ReplyChoice, stop_reason_of
from tailrace_gateway.core.in_flight import InFlightCall
from tailrace_gateway.core.session import Session
from tailrace_gateway.ports import SessionStore
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
from tailrace_protos.session import CallRefused, LedgerNode, RecordedAnswer

log = get_logger(__name__)


class SampledReply(NamedTuple):
    """A sampled reply. `broken`: field of the request whose constraint it violates, or empty."""

    generation: Generation
    parsed: ParsedReply
    broken: str = ""


class Capture:
    """Writes finished calls to the ledger and to the log."""

    def __init__(self, store: SessionStore) -> None:
        self._store = store
        self._writing: set[asyncio.Task[None]] = set()

    async def keep(
        self,
        session: Session,
        prompts: Sequence[Prompt],
        tries: Sequence[Sequence[SampledReply]],
        completion: Completion,
        name: str,
    ) -> None:
        """Record a finished call; a failure of the store masks the call and raises nothing.

        `tries`: the replies of each choice. All but the last were sampled again: they get reward 0.
        """
        num_choices = len(completion.choices) // len(prompts)
        nodes: list[LedgerNode] = []
        for choice, replies in zip(completion.choices, tries, strict=True):
            prompt, own_id = prompts[choice.index // num_choices], choice.completion_id
            for number, (generation, parsed, broken) in enumerate(replies[:-1]):
                node_id = f"{own_id}-again{number}"
                session.record_call(prompt, generation, parsed, node_id, broken, choice.index)
                nodes.append(session.ledger.set_reward(0.0, node_id))
            generation, parsed, broken = replies[-1]
            nodes.append(session.record_call(prompt, generation, parsed, own_id, broken, choice.index))
        writing = asyncio.create_task(self._write(session, nodes, completion, name))
        self._writing.add(writing)
        writing.add_done_callback(self._writing.discard)
        await asyncio.shield(writing)

    async def _write(
        self, session: Session, nodes: Sequence[LedgerNode], completion: Completion, name: str
    ) -> None:
        missing = tuple(session.missing.values())
        try:
            length = await self._store.append(
                session.session_id,
                session.nonce,
                completion.opening.completion_id,
                [encode(node) for node in (*missing, *nodes)],
                answer=(name, answer_of(completion)),
            )
        except StoreError as error:
            self._mask(session, nodes, f"not captured: {error}")
            return
        if length < 0:
            session.is_open = False
            self._mask(session, nodes, "the session was over")
            return
        session.appended(len(missing) + len(nodes), length)
        for node in missing:
            session.missing.pop(node.completion_id, None)

    async def keep_refusal(self, session: Session, code: str) -> None:
        """Record, once per session, that calls are refused for a used-up limit."""
        if code in session.refusals:
            return
        entry = CallRefused(code)
        session.take(entry)
        try:
            length = await self._store.append(
                session.session_id, session.nonce, f"refused-{code}", [encode(entry)]
            )
        except StoreError as error:
            log.warning("refusal not recorded", session_id=session.session_id, reason=str(error))
            return
        if length >= 0:
            session.appended(1, length)

    def _mask(self, session: Session, nodes: Sequence[LedgerNode], reason: str) -> None:
        metrics.UNCAPTURED.inc()
        log.warning("call not captured", session_id=session.session_id, reason=reason)
        for node in nodes:
            masked = session.ledger.mask(node.completion_id, reason)
            session.missing[node.completion_id] = masked


def answer_of(completion: Completion) -> bytes:
    """Return the record of an answer; its text is in the ledger."""
    return encode(
        RecordedAnswer(
            completion.opening.completion_id,
            completion.opening.created_unix_s,
            tuple(choice.completion_id for choice in completion.choices),
            tuple(choice.stop_matched for choice in completion.choices),
            completion.num_prompt_tokens,
            completion.num_cached_tokens,
            *_packed_tops(completion.choices),
            num_prompts=len(completion.opening.prompts),
        )
    )


def _packed_tops(
    choices: Sequence[ReplyChoice],
) -> tuple[tuple[Int32Bytes, ...], tuple[Float32Bytes, ...]]:
    """Return `top_ids` and `top_logprobs` of every choice; two empty tuples if no choice has them."""
    ids = [one.top_ids for one in choices]
    logprobs = [one.top_logprobs for one in choices]
    if all(one is None for one in ids):
        return (), ()
    return (
        tuple(EMPTY if one is None else pack_int32(one.ravel()) for one in ids),
        tuple(EMPTY if one is None else pack_float32(one.ravel()) for one in logprobs),
    )


def completion_of(answer: bytes, session: Session, running: InFlightCall) -> Completion:
    """Rebuild a recorded answer and send it to the listeners of `running`."""
    recorded = decode(answer, RecordedAnswer)
    nodes = [session.node(node_id) for node_id in recorded.node_ids]
    firsts = recorded.node_ids[:: len(nodes) // recorded.num_prompts]
    prompts = tuple(map(session.prompt_ids, firsts))
    opening = CallStart(recorded.completion_id, recorded.created_unix_s, prompts)
    running.open(opening)
    choices = tuple(_choice(index, node, recorded) for index, node in enumerate(nodes))
    for choice in choices:
        delta = ReplyDelta(choice.message.content, choice.message.reasoning)
        tops = choice.top_ids, choice.top_logprobs
        running.add_piece(Piece(choice.index, delta, choice.token_ids, choice.logprobs, *tops))
    return Completion(opening, choices, recorded.num_cached_tokens)


def _choice(index: int, node: LedgerNode, recorded: RecordedAnswer) -> ReplyChoice:
    token_ids = as_int32(node.token_ids)
    top_ids, top_logprobs = (
        as_top_logprobs(recorded.top_ids[index], recorded.top_logprobs[index], len(token_ids))
        if recorded.top_ids
        else (None, None)
    )
    return ReplyChoice(
        index,
        node.completion_id,
        node.reply,
        stop_reason_of(node.reply, node.finish_reason),
        recorded.stops_matched[index],
        token_ids,
        as_float32(node.inference_logprobs),
        top_ids,
        top_logprobs,
    )
