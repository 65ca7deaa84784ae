"""What a ledger is given and gives: the prompt of a call to be made, the tokens of one made."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from tailrace_protos.chat import ChatMessage, ToolSchema
from tailrace_protos.generation import FinishReason, TokenSpan


class Prompt(NamedTuple):
    """Give `prompt_ids` to the engine and the whole thing back to `Ledger.record`.

    `is_rendered_whole`: the parent's messages are continued, but none of its tokens.
    `is_fork`: text of a reply was inserted instead of its tokens, or all was rendered anew.
    """

    parent_id: str  # empty: a conversation begins here
    messages: tuple[ChatMessage, ...]  # the new ones
    inserted_ids: NDArray[np.int32]  # [o]
    prompt_ids: NDArray[np.int32]  # [P] all tokens; its last o are `inserted_ids`
    is_fork: bool
    tools: tuple[ToolSchema, ...] = ()
    is_rendered_whole: bool = False


class Sampled(Protocol):
    """What an engine answered, as `tailrace.channel` collects it; [t] tokens."""

    @property
    def token_ids(self) -> NDArray[np.int32]:
        """Ids [t]."""

    @property
    def inference_logprobs(self) -> NDArray[np.float32]:
        """Log-probabilities [t] of the ids."""

    @property
    def spans(self) -> tuple[TokenSpan, ...]:
        """Who sampled them; the numbers of tokens sum to t."""

    @property
    def finish_reason(self) -> FinishReason | None:
        """None if the call did not end by itself."""
