"""Sampling of a call: each choice within its budget and deadline, captured before the answer.

Invariant: an answer goes out only after its tokens are in the log, or their nodes are masked.

A session limits the tokens sampled over all its calls and the length of each conversation. Concurrent
calls do not see each other's tokens; the choices of one call share the remaining budget.

A reply that violates a constraint of its request (`gateway.on_broken_promise`) is refused, passed, or
sampled again. A reply that was sampled again stays in the ledger, with reward 0.
"""

import asyncio
import itertools
import uuid
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from tailrace.channel.generation import Generation
from tailrace.channel.top_logprobs import top_logprob_arrays
from tailrace.chat import ParsedReply, Renderer, ReplyDelta, ReplyStream
from tailrace.clock import Clock
from tailrace.ledger import Prompt
from tailrace.sdk.policy import GenerationFailedError, PromptTooLongError, TurnRequest
from tailrace.tracing import carried, episode
from tailrace_gateway.core.call import (
    CallStart,
    Completion,
    ModelCall,
    OutputConstraints,
    Piece,
    ReplyChoice,
    stop_reason_of,
)
from tailrace_gateway.core.capture import Capture, SampledReply
from tailrace_gateway.core.errors import (
    ApiError,
    BadRequestError,
    BudgetSpentError,
    ContextOverflowError,
    OutputConstraintError,
    UnavailableError,
)
from tailrace_gateway.core.guides import Guiding, guide_of
from tailrace_gateway.core.in_flight import InFlightCall
from tailrace_gateway.core.output_constraints import NO_CONSTRAINTS, broken_constraint
from tailrace_gateway.core.prompts import Renderings
from tailrace_gateway.core.session import Session
from tailrace_gateway.ports import SessionPolicy
from tailrace_protos.base import Int32Bytes, as_float32, as_int32, pack_int32
from tailrace_protos.generation import Guide, SamplingParams, TokenChunk
from tailrace_protos.session import SessionLimits

_RETRY_AFTER_S = 1.0
_SEED_MASK = (1 << 63) - 1
_NO_IDS: NDArray[np.int32] = np.empty(0, np.int32)
_NO_LOGPROBS: NDArray[np.float32] = np.empty(0, np.float32)


class PromiseRule(NamedTuple):
    """Rule for constraints. `max_asks`: replies sampled at most per choice."""

    on_broken: Literal["refuse", "pass", "ask_again"] = "pass"
    max_asks: int = 1
    guiding: Guiding = "off"


@dataclass(frozen=True, slots=True)
class _Job:
    """Data that all choices of a call share."""

    session: Session
    call: ModelCall
    prompts: tuple[Int32Bytes, ...]
    budgets: tuple[int, ...]  # maximum tokens of a reply to each prompt
    left: int  # remaining tokens of the session per choice
    sampling: SamplingParams
    ordinal: int
    opening: CallStart
    running: InFlightCall
    guide: Guide | None


class PieceStreamer:
    """Converts the chunks of one choice into pieces of a stream."""

    def __init__(self, running: InFlightCall, index: int, stream: ReplyStream) -> None:
        self._running = running
        self._index = index
        self._stream = stream

    def on_chunk(self, chunk: TokenChunk) -> None:
        """Publish new tokens."""
        token_ids = as_int32(chunk.token_ids)
        delta = self._stream.feed(token_ids)
        logprobs = as_float32(chunk.inference_logprobs)
        self._running.add_piece(
            Piece(self._index, delta, token_ids, logprobs, *top_logprob_arrays(chunk))
        )

    def finish(self) -> ParsedReply:
        """Return the whole reply; publish the text that was held back until the end."""
        parsed = self._stream.finish()
        if parsed.rest.content or parsed.rest.reasoning:
            self._running.add_piece(Piece(self._index, parsed.rest, _NO_IDS, _NO_LOGPROBS))
        return parsed


class Sampler:
    """Samples the choices of calls."""

    def __init__(
        self,
        policy: SessionPolicy,
        renderings: Renderings,
        plain: Renderer,
        capture: Capture,
        clock: Clock,
        promises: PromiseRule,
    ) -> None:
        self._policy = policy
        self._promises = promises
        self._renderings = renderings
        self._plain = plain  # parses replies as plain text
        self._capture = capture
        self._clock = clock
        own = uuid.uuid4().hex[:20]  # ids are unique over replicas
        self._ids = map(f"tr-{own}{{:012x}}".format, itertools.count())

    async def sample(
        self,
        session: Session,
        call: ModelCall,
        prompts: Sequence[Prompt],
        name: str,
        running: InFlightCall,
    ) -> Completion:
        """Sample all choices, record the completion under `name`, and return it."""
        limits, num_sampled = session.record.limits, session.ledger.num_sampled
        num_choices = call.num_choices * len(prompts)
        ids = tuple(prompt.prompt_ids for prompt in prompts)
        budgets = tuple(reply_room(limits, len(one), call.max_new_tokens) for one in ids)
        left = budget_left(limits, num_sampled, num_choices)
        renderer = self._renderings.of(call.template_args).renderer
        guide = guide_of(call, renderer, self._promises.guiding)
        opening = CallStart(next(self._ids), int(self._clock.unix_s()), ids)
        running.open(opening)
        job = _Job(
            session,
            call,
            tuple(map(pack_int32, ids)),
            budgets,
            left,
            call.sampling.applied_to(session.sampling),
            session.number_call(),
            opening,
            running,
            guide,
        )
        tries = await self._all_choices(job, num_choices)
        choices = tuple(
            _choice(index, opening, replies[-1].parsed, replies[-1].generation)
            for index, replies in enumerate(tries)
        )
        completion = Completion(opening, choices, tries[0][0].generation.num_cached_tokens)
        await self._capture.keep(session, prompts, tries, completion, name)
        return completion

    def refuse_broken(self, constraints: OutputConstraints, completion: Completion) -> None:
        """Raise `OutputConstraintError` if a choice violates a constraint and the rule refuses that."""
        if constraints is NO_CONSTRAINTS or self._promises.on_broken != "refuse":
            return
        for choice in completion.choices:
            broken = broken_constraint(constraints, choice.message, choice.stop_reason)
            if broken is not None:
                node_id = choice.completion_id
                raise OutputConstraintError(broken.reason, param=broken.param, completion_id=node_id)

    async def _all_choices(self, job: _Job, num_choices: int) -> "list[list[SampledReply]]":
        session = job.session
        left_s = session.record.limits.deadline_unix_s - self._clock.unix_s()
        job.running.set_deadline(left_s, session.deadline_error())
        try:
            if num_choices == 1:
                return [await self._tries(job, 0)]
            return await _together([self._tries(job, index) for index in range(num_choices)])
        except GenerationFailedError as error:
            raise _failed(error) from error
        finally:
            job.running.clear_deadline()

    async def _tries(self, job: _Job, index: int) -> list[SampledReply]:
        """Sample a choice, again while it violates a constraint and the rule allows."""
        is_again = self._asks_again(job)
        max_asks = self._promises.max_asks if is_again else 1
        left, tries = job.left, list[SampledReply]()
        while True:
            stream_to = None if is_again or not job.running.streams else job.running
            reply = await self._reply(job, index, len(tries), left, stream_to)
            left -= len(reply.generation.token_ids)
            tries.append(reply)
            if not reply.broken or left <= 0 or len(tries) == max_asks:
                break
        if is_again and job.running.streams:
            job.running.add_piece(_whole_piece(index, tries[-1]))
        return tries

    def _asks_again(self, job: _Job) -> bool:
        """True if a reply may be sampled again; its stream then waits for the last one."""
        is_constrained = job.call.constraints is not NO_CONSTRAINTS
        is_random = job.sampling.temperature > 0
        return is_constrained and is_random and self._promises.on_broken == "ask_again"

    async def _reply(
        self, job: _Job, index: int, number: int, left: int, stream_to: InFlightCall | None
    ) -> SampledReply:
        session, call = job.session, job.call
        seed = call_seed(session.record.sampling_seed, call.sampling.seed, job.ordinal, index)
        if number and seed is not None:
            seed = _mix(seed, number)
        chat = self._renderings.of(call.template_args).renderer
        stream = (self._plain if call.is_token_level else chat).reply_stream(
            call.tools,
            stop=job.sampling.stop,
            stop_token_ids=job.sampling.stop_token_ids,
            id_seed=choice_id(job.opening, index),
            finds_calls=call.finds_calls,
        )
        streamer = None if stream_to is None else PieceStreamer(stream_to, index, stream)
        place = index // call.num_choices
        request = TurnRequest(
            job.prompts[place],
            min(job.budgets[place], left),
            msgspec.structs.replace(job.sampling, seed=seed),
            session.session_id,
            job.ordinal,
            on_chunk=None if streamer is None else streamer.on_chunk,
            top_logprobs=call.top_logprobs,
            guide=job.guide,
        )
        with carried(episode(session.session_id)):
            generation = await self._policy.generate(request)
        if streamer is None:
            stream.feed(generation.token_ids)
        parsed = stream.finish() if streamer is None else streamer.finish()
        stop_reason = stop_reason_of(parsed.message, generation.finish_reason)
        broken = broken_constraint(call.constraints, parsed.message, stop_reason)
        return SampledReply(generation, parsed, broken.param if broken else "")


def _whole_piece(index: int, reply: SampledReply) -> Piece:
    """Return a reply that was not streamed as one piece."""
    generation, message = reply.generation, reply.parsed.message
    return Piece(
        index,
        ReplyDelta(message.content, message.reasoning),
        generation.token_ids,
        generation.inference_logprobs,
        generation.top_ids,
        generation.top_logprobs,
    )


async def _together(
    work: Sequence[Coroutine[Any, Any, list[SampledReply]]],
) -> list[list[SampledReply]]:
    """Return all results in order; the first failure cancels the rest."""
    tasks = [asyncio.create_task(one) for one in work]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()


def choice_id(opening: CallStart, index: int) -> str:
    """Return the ledger id of a choice; the first choice has the answer's id."""
    return f"{opening.completion_id}-{index}" if index else opening.completion_id


def _choice(index: int, opening: CallStart, parsed: ParsedReply, generation: Generation) -> ReplyChoice:
    stop = generation.stop_matched
    return ReplyChoice(
        index,
        choice_id(opening, index),
        parsed.message,
        stop_reason_of(parsed.message, generation.finish_reason),
        stop if isinstance(stop, str) else None,
        generation.token_ids,
        generation.inference_logprobs,
        generation.top_ids,
        generation.top_logprobs,
    )


def _failed(error: GenerationFailedError) -> ApiError:
    if isinstance(error, PromptTooLongError):
        return ContextOverflowError(error.num_prompt, error.limit_tokens)
    if error.num_attempts == 1:  # every server would refuse it
        return BadRequestError(f"the engine refuses the request: {error.reason}")
    return UnavailableError(f"no inference server answers: {error}", retry_after_s=_RETRY_AFTER_S)


def reply_room(limits: SessionLimits, num_prompt: int, wanted: int | None) -> int:
    """Return the maximum tokens of a reply; raise `ContextOverflowError` if there is no room."""
    room = limits.max_episode_tokens - num_prompt
    if room <= 0:
        raise ContextOverflowError(num_prompt, limits.max_episode_tokens)
    return room if wanted is None else min(room, wanted)


def budget_left(limits: SessionLimits, num_sampled: int, num_choices: int) -> int:
    """Return the session's remaining tokens per choice; raise `BudgetSpentError` if there are none."""
    left = (limits.max_new_tokens - num_sampled) // num_choices
    if left <= 0:
        raise BudgetSpentError(num_sampled, limits.max_new_tokens)
    return left


def call_seed(
    session_seed: int | None, request_seed: int | None, ordinal: int, choice: int
) -> int | None:
    """Return the seed of one choice; `ordinal` counts the session's calls. None: not seeded.

    A seed in the request fixes its choices at any position in the session.
    """
    if request_seed is not None:
        return _mix(request_seed, choice) if choice else request_seed & _SEED_MASK
    return None if session_seed is None else _mix(_mix(session_seed, ordinal + 1), choice)


def _mix(seed: int, number: int) -> int:
    """Advance the seed by `number` steps and return SplitMix64 of it."""
    mixed = (seed + (number + 1) * 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF
    mixed = (mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9 & 0xFFFFFFFFFFFFFFFF
    mixed = (mixed ^ (mixed >> 27)) * 0x94D049BB133111EB & 0xFFFFFFFFFFFFFFFF
    return (mixed ^ (mixed >> 31)) & _SEED_MASK
