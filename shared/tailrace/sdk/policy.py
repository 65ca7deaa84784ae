"""Interface of the model as episodes use it: token ids in, sampled tokens out."""

from collections.abc import Callable
from typing import Protocol

import msgspec

from tailrace.channel.generation import Generation
from tailrace_protos.base import Int32Bytes
from tailrace_protos.generation import Guide, SamplingParams, TokenChunk

OnChunk = Callable[[TokenChunk], None]


class GenerationFailedError(Exception):
    """No server could finish a turn. Attributes: `call_id`, `num_attempts`, `reason` (the last one)."""

    def __init__(self, call_id: str, num_attempts: int, reason: str) -> None:
        super().__init__(f"generation {call_id} failed {num_attempts} times; at last: {reason}")
        self.call_id = call_id
        self.num_attempts = num_attempts
        self.reason = reason


class PromptTooLongError(GenerationFailedError):
    """The prompt leaves no room in the engine's longest sequence: no failure, the episode is too long.

    Attributes: `num_prompt`, `limit_tokens`.
    """

    def __init__(self, call_id: str, num_prompt: int, limit_tokens: int) -> None:
        reason = (
            f"the prompt has {num_prompt} tokens, and the engine's longest sequence has {limit_tokens}"
        )
        super().__init__(call_id, 1, reason)
        self.num_prompt = num_prompt
        self.limit_tokens = limit_tokens


class TurnRequest(msgspec.Struct, frozen=True):
    """One model turn of an episode."""

    prompt_ids: Int32Bytes  # [P] all tokens of the conversation
    max_new_tokens: int
    sampling: SamplingParams
    episode_id: str
    turn: int  # number of the call in its episode, from 0
    on_chunk: OnChunk | None = None
    top_logprobs: int = 0
    guide: Guide | None = None


class Policy(Protocol):
    """A model as an episode sees it, wherever it runs."""

    async def generate(self, request: TurnRequest) -> Generation:
        """Continues `prompt_ids` [P]; raises `GenerationFailedError`, also `PromptTooLongError`.

        `on_chunk` gets newly sampled tokens as they arrive: each token once, in order, never an empty
        chunk. Only the returned generation tells how the call ended. Cancelling aborts the call.

        `top_logprobs` k above 0 fills `Generation.top_ids` [T, k] and `Generation.top_logprobs` [T, k],
        and the same fields of every chunk.
        """
