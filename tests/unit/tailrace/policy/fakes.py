"""Servers and a placement that do as told."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence

import numpy as np

from tailrace.channel.call import GenerateCall
from tailrace.channel.errors import ChannelError, GenerateRefusedError
from tailrace.channel.generation import Generation
from tailrace.channel.ports import Address
from tailrace_protos.base import EMPTY, pack_float32, pack_int32
from tailrace_protos.episode import Lease
from tailrace_protos.generation import (
    CallError,
    FinishReason,
    GenerateRequest,
    TokenChunk,
    TokenSpan,
)

Answer = Generation | Exception | Callable[[GenerateRequest], Generation | Exception]


def generation(
    ids: Sequence[int],
    version: int = 1,
    reason: FinishReason | None = FinishReason.STOP,
    logprob: float = -0.5,
) -> Generation:
    array = np.array(ids, np.int32)
    spans = (TokenSpan(version, "", len(ids)),) if len(ids) else ()
    return Generation(array, np.full(len(ids), logprob, np.float32), spans, reason, None, 0)


class ScriptedClient:
    """A `GenerateClient` whose calls bring one token a tick of the loop and end as the script says."""

    def __init__(self, *answers: Answer) -> None:
        self.answers = list(answers)
        self.requests: list[GenerateRequest] = []
        self.servers: list[str] = []
        self.aborted: list[str] = []
        self.released: list[tuple[str, str]] = []  # server id, episode id
        self.feeds: set[asyncio.Task[None]] = set()

    async def start(self) -> None: ...

    async def close(self) -> None: ...

    def release_prefix(self, address: Address, episode_id: str) -> None:
        self.released.append((address.server_id, episode_id))

    def generate(self, address: Address, request: GenerateRequest) -> GenerateCall:
        self.requests.append(request)
        self.servers.append(address.server_id)
        answer = self.answers.pop(0)
        if callable(answer) and not isinstance(answer, Exception | Generation):
            answer = answer(request)
        if isinstance(answer, Exception) and not isinstance(answer, ChannelError):
            raise answer
        call = GenerateCall(request, address.server_id, lambda call: self.aborted.append(call.call_id))
        feed = asyncio.create_task(_feed(call, answer))
        self.feeds.add(feed)
        feed.add_done_callback(self.feeds.discard)
        return call


async def _feed(call: GenerateCall, answer: Generation | ChannelError) -> None:
    tokens = answer if isinstance(answer, Generation) else answer.partial
    versions = [span.policy_version for span in tokens.spans for _ in range(span.num_tokens)]
    for at, version in enumerate(versions):
        await asyncio.sleep(0)
        call.feed(
            TokenChunk(
                call.call_id,
                pack_int32(tokens.token_ids[at : at + 1]),
                pack_float32(tokens.inference_logprobs[at : at + 1]),
                (TokenSpan(version, "", 1),),
                top_ids=EMPTY if tokens.top_ids is None else pack_int32(tokens.top_ids[at]),
                top_logprobs=(
                    EMPTY if tokens.top_logprobs is None else pack_float32(tokens.top_logprobs[at])
                ),
            )
        )
    await asyncio.sleep(0)
    if isinstance(answer, GenerateRefusedError):
        reason = answer.reason.partition(": ")[2]
        error = CallError(answer.code, reason, answer.retry_after_s, answer.limit_tokens)
        call.feed(TokenChunk(call.call_id, error=error))
    elif isinstance(answer, ChannelError):
        call.fail(answer.reason)
    elif answer.finish_reason is not None:  # None: it never ends
        call.feed(TokenChunk(call.call_id, finish_reason=answer.finish_reason))


class RoundRobinPlacement:
    """Gives servers s0, s1, ... in turn."""

    def __init__(self, num_servers: int = 2) -> None:
        self.num_servers = num_servers
        self.num_leases = 0
        self.ask_after_s = math.inf
        self.asked: list[tuple[str, str]] = []
        self.contexts: list[int] = []  # of those who asked
        self.turns: list[tuple[str, str, int, bool]] = []
        self.calls: list[tuple[str, bool]] = []
        self.released: list[str] = []

    async def lease(
        self,
        episode_id: str,
        context_tokens: int,
        failed_server_id: str = "",
        stay_at: Address | None = None,
    ) -> Address:
        self.asked.append((episode_id, failed_server_id))
        self.contexts.append(context_tokens)
        server = f"s{self.num_leases % self.num_servers}"
        self.num_leases += 1
        return Address(server)

    def take(self, lease: Lease) -> None:
        self.ask_after_s = lease.ask_after_s

    def report_turn(
        self, episode_id: str, server_id: str, context_tokens: int, *, is_over: bool
    ) -> None:
        self.turns.append((episode_id, server_id, context_tokens, is_over))

    def report_call(self, server_id: str, succeeded: bool) -> None:
        self.calls.append((server_id, succeeded))

    def release(self, episode_id: str) -> None:
        self.released.append(episode_id)
