"""What an episode asks for its next words: token ids in, sampled tokens out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from tailrace.channel.generation import Generation
from tailrace_protos.base import Int32Bytes
from tailrace_protos.generation import SamplingParams, TokenChunk

OnChunk = Callable[[TokenChunk], None]


class GenerationFailedError(Exception):
    """No server could finish a turn. Attributes: `call_id`, `num_attempts`, `reason` (the last one)."""

    def __init__(self, call_id: str, num_attempts: int, reason: str) -> None:
        super().__init__(f"generation {call_id} failed {num_attempts} times; at last: {reason}")
        self.call_id = call_id
        self.num_attempts = num_attempts
        self.reason = reason


class Policy(Protocol):
    """A model as an episode sees it, wherever it runs."""

    async def generate(
        self,
        prompt_ids: Int32Bytes,
        max_new_tokens: int,
        sampling: SamplingParams,
        *,
        episode_id: str,
        turn: int,
        on_chunk: OnChunk | None = None,
    ) -> Generation:
        """Continue `prompt_ids` [P], all tokens of the conversation; raises `GenerationFailedError`.

        `on_chunk` gets newly sampled tokens as they arrive: each once, in order, never an empty
        chunk; how the call ended is told by the returned generation only. Cancelling aborts the call.
        """


class RankingPolicy(Policy, Protocol):
    """A policy that also tells what else it might have said."""

    async def generate(
        self,
        prompt_ids: Int32Bytes,
        max_new_tokens: int,
        sampling: SamplingParams,
        *,
        episode_id: str,
        turn: int,
        on_chunk: OnChunk | None = None,
        top_logprobs: int = 0,
    ) -> Generation:
        """See `Policy`; `top_logprobs` k above 0 fills `Generation.top_ids` [T, k] and
        `top_logprobs` [T, k], and the same fields of every chunk.
        """
