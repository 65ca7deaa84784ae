"""Policy whose turns survive a failed server: it keeps streamed tokens and samples the rest elsewhere.

Invariants: no token is sampled twice for one turn; every call has its own id; attempts that bring no
token are bounded and spaced by a growing delay; an episode's lease is given back exactly once.
"""

import asyncio
import itertools
import math
import time
import uuid
from collections import Counter
from collections.abc import Awaitable, Coroutine
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import msgspec
import numpy as np
from prometheus_client import Counter as Metric

from tailrace.channel.call import GenerateCall
from tailrace.channel.errors import (
    ChannelError,
    ChannelFullError,
    GenerateRefusedError,
    NoRouteError,
    OversizeRequestError,
)
from tailrace.channel.generation import Generation, join_top_logprobs
from tailrace.channel.ports import Address, GenerateClient
from tailrace.policy.activity import Stages
from tailrace.provenance import join_spans
from tailrace.retry import Backoff
from tailrace.sdk.policy import GenerationFailedError, OnChunk, PromptTooLongError, TurnRequest
from tailrace.tracing import current_traceparent, span
from tailrace_protos.base import pack_int32
from tailrace_protos.control import bound_source
from tailrace_protos.episode import Lease
from tailrace_protos.generation import CallErrorCode, FinishReason, GenerateRequest


class ServerPlacement(Protocol):
    """Assigns servers to episodes."""

    ask_after_s: float
    """Seconds between two turns of an episode after which the second one asks for its server."""

    async def lease(
        self,
        episode_id: str,
        context_tokens: int,
        failed_server_id: str = "",
        stay_at: Address | None = None,
    ) -> Address:
        """Returns a server for the episode, not `failed_server_id`; waits while none has room.

        `stay_at`: its server so far, which it keeps while no scheduler answers.
        """

    def take(self, lease: Lease) -> None:
        """Takes a lease that came with the episode."""

    def report_turn(
        self, episode_id: str, server_id: str, context_tokens: int, *, is_over: bool
    ) -> None:
        """Reports the begin of a turn, or its end, and the tokens of its context."""

    def report_call(self, server_id: str, succeeded: bool) -> None:
        """Reports a call of this server as succeeded or failed."""

    def release(self, episode_id: str) -> None:
        """Frees the lease of an ended episode."""


CONTINUED_CALLS = Metric(
    "tailrace_policy_continued_calls", "Generation calls made again after a failure."
)


_FINISHED = (FinishReason.STOP, FinishReason.LENGTH)
_EMPTY = Generation(np.empty(0, np.int32), np.empty(0, np.float32), (), None, None, 0)


@dataclass(slots=True)
class _Place:
    """Server of an episode."""

    address: Address
    rested_s: float = math.inf  # end of its last turn, on the monotonic clock


class _Failure(NamedTuple):
    """A call that did not finish: the reason and the tokens so far."""

    reason: str
    partial: Generation = _EMPTY
    retry_after_s: float = 0.0
    is_servers_fault: bool = True  # counts against the server's health
    is_elsewhere: bool = True  # another server may do better
    is_final: bool = False  # no server would take the request
    limit_tokens: int = 0  # longest sequence of a server that the request is too long for


class ContinuingPolicy:
    """Policy of a run: leases a server per episode and continues its turns after failures.

    `begin` and `end` bracket an episode. `max_attempts` bounds the calls in a row that bring no token.
    """

    def __init__(
        self,
        placement: ServerPlacement,
        client: GenerateClient,
        stages: Stages,
        *,
        max_attempts: int = 10,
        max_delay_s: float = 3.0,
    ) -> None:
        self._placement = placement
        self._client = client
        self._stages = stages
        self._max_attempts = max_attempts
        self._max_delay_s = max_delay_s
        self._places: dict[str, _Place] = {}
        self._num_turns: Counter[str] = Counter()  # that run now, by episode
        self._ended: set[str] = set()  # episodes that these turns outlive
        self._call_ids = map(f"{uuid.uuid4().hex[:8]}{{:x}}".format, itertools.count())

    def begin(self, episode_id: str, lease: Lease | None = None) -> None:
        """Starts an episode, on the leased server; without a lease its first turn asks for one."""
        self._ended.discard(episode_id)
        if lease is not None:
            self._placement.take(lease)
            self._places[episode_id] = _Place(Address.of(lease))

    def end(self, episode_id: str) -> None:
        """Ends the episode and frees its lease, even one that is granted too late."""
        if episode_id in self._num_turns:
            self._ended.add(episode_id)
        place = self._places.pop(episode_id, None)
        if place is not None:
            self._client.release_prefix(place.address, episode_id)
        self._placement.release(episode_id)

    def generate(self, request: TurnRequest) -> Coroutine[Any, Any, Generation]:
        """See `Policy`; one server samples the turn or, after failures, several."""
        turn = self._generate(request)
        return _traced(turn, request) if current_traceparent() else turn

    async def _generate(self, request: TurnRequest) -> Generation:
        episode_id = request.episode_id
        num_prompt = len(request.prompt_ids) // 4  # int32
        call = GenerateRequest(
            call_id=f"{episode_id}.{request.turn}.{next(self._call_ids)}",
            episode_id=episode_id,
            prompt_ids=request.prompt_ids,
            max_new_tokens=request.max_new_tokens,
            sampling=request.sampling,
            traceparent=current_traceparent(),
            top_logprobs=request.top_logprobs,
            guide=request.guide,
        )
        self._stages.num_generating += 1
        self._num_turns[episode_id] += 1
        try:
            address = self._address(episode_id, num_prompt)
            if address is None:
                place = self._places.get(episode_id)
                address = await self._lease(call, stay_at=place.address if place else None)
            outcome = await self._call(address, call, request.on_chunk)
            if not isinstance(outcome, Generation):
                outcome = await self._continue(call, address, outcome, request.on_chunk)
            self._rest(episode_id, num_prompt + outcome.num_tokens)
            return outcome
        finally:
            self._stages.num_generating -= 1
            self._num_turns[episode_id] -= 1
            if not self._num_turns[episode_id]:
                del self._num_turns[episode_id]
                self._ended.discard(episode_id)

    def _address(self, episode_id: str, num_prompt: int) -> Address | None:
        """Server of the last turn for the next one; None if a long time has passed since."""
        place = self._places.get(episode_id)
        if place is None or time.monotonic() - place.rested_s > self._placement.ask_after_s:
            return None
        address = place.address
        self._placement.report_turn(episode_id, address.server_id, num_prompt, is_over=False)
        return address

    async def _lease(
        self, call: GenerateRequest, failed_server_id: str = "", stay_at: Address | None = None
    ) -> Address:
        episode_id, num_prompt = call.episode_id, len(call.prompt_ids) // 4
        address = await self._placement.lease(episode_id, num_prompt, failed_server_id, stay_at)
        if episode_id in self._ended:  # what it played has left this turn behind
            self._placement.release(episode_id)
            raise GenerationFailedError(call.call_id, 0, "the episode has ended")
        before = self._places.get(episode_id)
        if before is not None and before.address != address:
            self._client.release_prefix(before.address, episode_id)
        self._places[episode_id] = _Place(address)
        return address

    def _rest(self, episode_id: str, num_tokens: int) -> None:
        """Notes the end of a turn whose conversation has `num_tokens` now."""
        place = self._places.get(episode_id)
        if place is not None:
            place.rested_s = time.monotonic()
            server_id = place.address.server_id
            self._placement.report_turn(episode_id, server_id, num_tokens, is_over=True)

    async def _call(
        self, address: Address, request: GenerateRequest, on_chunk: OnChunk | None
    ) -> Generation | _Failure:
        try:
            call = self._client.generate(address, request)
        except (OversizeRequestError, NoRouteError) as error:
            return _Failure(str(error), is_servers_fault=False, is_final=True)
        except ChannelFullError as error:
            return _Failure(str(error), is_servers_fault=False, is_elsewhere=False)
        source = address.source if request.guide is None else bound_source(address.source)
        try:
            generation = await (_stream(call, on_chunk) if on_chunk else call.collect())
        except ChannelError as error:
            outcome: Generation | _Failure = _failure(error, source)
        else:
            generation = generation.sampled_by(source)
            if generation.finish_reason in _FINISHED:
                outcome = generation
            else:  # aborted by the server, not by us
                outcome = _Failure(f"aborted by {address.server_id}", generation)
        if isinstance(outcome, Generation) or outcome.is_servers_fault:
            self._placement.report_call(address.server_id, isinstance(outcome, Generation))
        return outcome

    async def _continue(
        self,
        original: GenerateRequest,
        address: Address,
        failure: _Failure,
        on_chunk: OnChunk | None,
    ) -> Generation:
        """Samples the missing tokens, server after server."""
        parts: list[Generation] = []
        backoff = Backoff(0.05, self._max_delay_s)
        while True:
            if failure.partial.num_tokens:
                parts.append(failure.partial)
                backoff.reset()
            joined = _join(parts)
            if finish_reason := _finished_by_itself(joined, original):
                return _join(parts, finish_reason)
            if failure.limit_tokens and parts:  # as far as a reply may be
                return _join(parts, FinishReason.LENGTH)
            self._require_hope(original, failure, backoff.num_failures)
            await asyncio.sleep(max(backoff.next_s(), failure.retry_after_s))
            failed_server_id = address.server_id if failure.is_elsewhere else ""
            rest = self._rest_of(original, joined)
            address = await self._lease(rest, failed_server_id)
            CONTINUED_CALLS.inc()
            outcome = await self._call(address, rest, on_chunk)
            if isinstance(outcome, Generation):
                return _join([*parts, outcome], outcome.finish_reason)
            failure = outcome

    def _require_hope(self, original: GenerateRequest, failure: _Failure, num_failures: int) -> None:
        """Raises `GenerationFailedError` if the call is not worth another attempt."""
        if failure.limit_tokens:
            num_prompt = len(original.prompt_ids) // 4
            raise PromptTooLongError(original.call_id, num_prompt, failure.limit_tokens)
        if failure.is_final or num_failures >= self._max_attempts:
            raise GenerationFailedError(original.call_id, num_failures + 1, failure.reason)

    def _rest_of(self, original: GenerateRequest, sampled: Generation) -> GenerateRequest:
        return msgspec.structs.replace(
            original,
            call_id=f"{original.call_id}.{next(self._call_ids)}",
            prompt_ids=memoryview(bytes(original.prompt_ids) + bytes(pack_int32(sampled.token_ids))),
            max_new_tokens=original.max_new_tokens - sampled.num_tokens,
            num_continued=sampled.num_tokens,
        )


async def _traced(turn: Awaitable[Generation], request: TurnRequest) -> Generation:
    """Awaits the turn in a span of the current trace."""
    num_prompt = len(request.prompt_ids) // 4
    with span("turn", turn=request.turn, num_prompt_tokens=num_prompt) as made:
        generation = await turn
        made.set(num_sampled_tokens=generation.num_tokens)
        return generation


async def _stream(call: GenerateCall, on_chunk: OnChunk) -> Generation:
    """Collects all tokens of the call and passes them on as they arrive. Cancelling aborts the call."""
    try:
        async for chunk in call:
            if len(chunk.token_ids):
                on_chunk(msgspec.structs.replace(chunk, finish_reason=None, stop_matched=None))
    finally:
        call.abort()  # no effect after its end
    return call.partial()


def _failure(error: ChannelError, source: str) -> _Failure:
    partial = error.partial.sampled_by(source)
    if not isinstance(error, GenerateRefusedError):
        return _Failure(str(error), partial)
    return _Failure(
        str(error),
        partial,
        error.retry_after_s,
        is_servers_fault=error.code is CallErrorCode.INTERNAL,
        is_final=error.code in (CallErrorCode.INVALID, CallErrorCode.TOO_LONG),
        limit_tokens=error.limit_tokens,
    )


def _finished_by_itself(joined: Generation, request: GenerateRequest) -> FinishReason | None:
    """Finish reason of a turn whose tokens all arrived, but not the message of its end."""
    if not joined.num_tokens:
        return None
    if int(joined.token_ids[-1]) in request.sampling.stop_token_ids:
        return FinishReason.STOP
    return FinishReason.LENGTH if joined.num_tokens >= request.max_new_tokens else None


def _join(parts: list[Generation], finish_reason: FinishReason | None = None) -> Generation:
    if not parts:
        return _EMPTY
    return Generation(
        np.concatenate([part.token_ids for part in parts]),
        np.concatenate([part.inference_logprobs for part in parts]),
        join_spans(span for part in parts for span in part.spans),
        finish_reason,
        parts[-1].stop_matched,
        parts[0].num_cached_tokens,
        *join_top_logprobs(parts),
        next((part.first_token_at_s for part in parts if part.num_tokens), 0.0),
    )
