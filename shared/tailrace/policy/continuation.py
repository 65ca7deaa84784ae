"""Policy whose turns survive a failed server: it keeps streamed tokens and samples the rest elsewhere.

Invariants: no token is sampled twice for one turn; every call has its own id; attempts that bring no
token are bounded and spaced by a growing delay; an episode's lease is given back exactly once.
"""

import asyncio
import itertools
import uuid
from typing import NamedTuple, Protocol

import msgspec
import numpy as np
from prometheus_client import Counter

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
from tailrace.sdk.policy import GenerationFailedError, OnChunk, TurnRequest
from tailrace.tracing import current_traceparent
from tailrace_protos.base import pack_int32
from tailrace_protos.generation import CallErrorCode, FinishReason, GenerateRequest


class ServerPlacement(Protocol):
    """Assigns servers to episodes."""

    async def lease(
        self, episode_id: str, predicted_tokens: int, failed_server_id: str = ""
    ) -> Address:
        """Returns a server for the episode, not `failed_server_id`; waits while none is healthy."""

    def report_call(self, server_id: str, succeeded: bool) -> None:
        """Reports a call of this server as succeeded or failed."""

    def release(self, episode_id: str) -> None:
        """Frees the lease of an ended episode."""


CONTINUED_CALLS = Counter(
    "tailrace_policy_continued_calls", "Generation calls made again after a failure."
)


_FINISHED = (FinishReason.STOP, FinishReason.LENGTH)
_EMPTY = Generation(np.empty(0, np.int32), np.empty(0, np.float32), (), None, None, 0)


class _Failure(NamedTuple):
    """A call that did not finish: the reason and the tokens so far."""

    reason: str
    partial: Generation = _EMPTY
    retry_after_s: float = 0.0
    is_servers_fault: bool = True  # counts against the server's health
    is_elsewhere: bool = True  # another server may do better
    is_final: bool = False  # no server would take the request


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
        self._predicted: dict[str, int] = {}
        self._addresses: dict[str, Address] = {}
        self._call_ids = map(f"{uuid.uuid4().hex[:8]}{{:x}}".format, itertools.count())

    def begin(self, episode_id: str, predicted_tokens: int) -> None:
        """Starts an episode that will sample about `predicted_tokens` tokens."""
        self._predicted[episode_id] = predicted_tokens

    def end(self, episode_id: str) -> None:
        """Ends the episode and frees its lease, even one that was granted too late."""
        del self._predicted[episode_id]
        self._addresses.pop(episode_id, None)
        self._placement.release(episode_id)

    async def generate(self, request: TurnRequest) -> Generation:
        """See `Policy`; one server samples the turn or, after failures, several."""
        episode_id, on_chunk = request.episode_id, request.on_chunk
        call = GenerateRequest(
            call_id=f"{episode_id}.{request.turn}.{next(self._call_ids)}",
            episode_id=episode_id,
            prompt_ids=request.prompt_ids,
            max_new_tokens=request.max_new_tokens,
            sampling=request.sampling,
            traceparent=current_traceparent(),
            top_logprobs=request.top_logprobs,
        )
        self._stages.num_generating += 1
        try:
            address = self._addresses.get(episode_id) or await self._lease(episode_id)
            outcome = await self._call(address, call, on_chunk)
            if isinstance(outcome, Generation):
                return outcome
            return await self._continue(call, address, outcome, on_chunk)
        finally:
            self._stages.num_generating -= 1

    async def _lease(self, episode_id: str, failed_server_id: str = "") -> Address:
        predicted_tokens = self._predicted.get(episode_id, 0)
        address = await self._placement.lease(episode_id, predicted_tokens, failed_server_id)
        self._addresses[episode_id] = address
        return address

    async def _call(
        self, address: Address, request: GenerateRequest, on_chunk: OnChunk | None
    ) -> Generation | _Failure:
        try:
            call = self._client.generate(address, request)
        except (OversizeRequestError, NoRouteError) as error:
            return _Failure(str(error), is_servers_fault=False, is_final=True)
        except ChannelFullError as error:
            return _Failure(str(error), is_servers_fault=False, is_elsewhere=False)
        try:
            generation = await (_stream(call, on_chunk) if on_chunk else call.collect())
        except ChannelError as error:
            outcome: Generation | _Failure = _failure(error, address.source)
        else:
            generation = generation.sampled_by(address.source)
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
            if failure.is_final or backoff.num_failures >= self._max_attempts:
                raise GenerationFailedError(original.call_id, backoff.num_failures + 1, failure.reason)
            await asyncio.sleep(max(backoff.next_s(), failure.retry_after_s))
            failed_server_id = address.server_id if failure.is_elsewhere else ""
            address = await self._lease(original.episode_id, failed_server_id)
            CONTINUED_CALLS.inc()
            outcome = await self._call(address, self._rest_of(original, joined), on_chunk)
            if isinstance(outcome, Generation):
                return _join([*parts, outcome], outcome.finish_reason)
            failure = outcome

    def _rest_of(self, original: GenerateRequest, sampled: Generation) -> GenerateRequest:
        return msgspec.structs.replace(
            original,
            call_id=f"{original.call_id}.{next(self._call_ids)}",
            prompt_ids=memoryview(bytes(original.prompt_ids) + bytes(pack_int32(sampled.token_ids))),
            max_new_tokens=original.max_new_tokens - sampled.num_tokens,
            num_continued=sampled.num_tokens,
        )


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
        is_final=error.code is CallErrorCode.INVALID,
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
    )
