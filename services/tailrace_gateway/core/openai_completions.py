"""OpenAI's completions: a prompt of token ids or bare text, continued as it is.

Callers who keep tokens themselves use this with `return_token_ids`: what they send on is matched by its
exact ids. `max_tokens` left out means what is left of the session, not 16.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from tailrace_gateway.core.body import DefaultOnly, NumberRanges, read_body
from tailrace_gateway.core.call import CallStart, Completion, ModelCall, Piece, ReplyChoice, StopReason
from tailrace_gateway.core.errors import BadRequestError, UnsupportedError
from tailrace_gateway.core.openai_answers import (
    OpenAIStream,
    TokenLogprobs,
    TokenText,
    tops_of,
    whole_answer,
)
from tailrace_gateway.core.openai_request import OpenAIRequest

_DEFAULT_ONLY = DefaultOnly(echo=(False,), suffix=("",), best_of=(1,))
_RANGES = NumberRanges(logprobs=(0, 5))
_MAX_ID = (1 << 31) - 1


class CompletionRequest(OpenAIRequest, frozen=True, kw_only=True):
    """The body of a completion. The second part is refused unless it changes nothing."""

    prompt: str | list[str | int | list[int]]
    logprobs: int | None = None

    echo: bool | None = None
    suffix: str | None = None
    best_of: int | None = None


def read_completion(raw: bytes) -> tuple[CompletionRequest, ModelCall]:
    """The request and what it asks of the model; raises `BadRequestError`."""
    body = read_body(raw, CompletionRequest)
    body.require_shared()
    _DEFAULT_ONLY.require(body)
    _RANGES.require(body)
    text, ids = _prompt(body.prompt)
    return body, ModelCall(
        prompt_text=text,
        prompt_ids=ids,
        num_choices=body.num_choices,
        max_new_tokens=body.max_tokens,
        top_logprobs=body.logprobs or 0,
        sampling=body.overrides(),
    )


def _prompt(prompt: str | list[str | int | list[int]]) -> tuple[str, NDArray[np.int32] | None]:
    """The one prompt, as text or as ids."""
    if isinstance(prompt, str):
        return prompt, None
    if len(prompt) == 1 and isinstance(prompt[0], str):
        return prompt[0], None
    ids: Any = prompt[0] if len(prompt) == 1 and isinstance(prompt[0], list) else prompt
    if not all(isinstance(one, int) for one in ids):
        reason = "prompt: one prompt a request; send several requests at once for several prompts"
        raise UnsupportedError(reason, param="prompt")
    if not all(0 <= one <= _MAX_ID for one in ids):
        raise BadRequestError("prompt: token ids must not be negative", param="prompt")
    return "", np.array(ids, np.int32)


def completion_answer(
    body: CompletionRequest, completion: Completion, token_text: TokenText
) -> dict[str, Any]:
    """The answer to a request that does not stream."""

    def tell(choice: ReplyChoice) -> dict[str, Any]:
        told: dict[str, Any] = {
            "index": choice.index,
            "text": choice.message.content,
            "logprobs": None,
            "finish_reason": _reason(choice),
        }
        if body.logprobs is not None:
            told["logprobs"] = logprob_lists(token_text, choice, 0)
        return told

    return whole_answer(body, "text_completion", completion, tell)


def _reason(choice: ReplyChoice) -> str:
    return "length" if choice.stop_reason is StopReason.LENGTH else "stop"


def logprob_lists(token_text: TokenText, sampled: TokenLogprobs, offset: int) -> dict[str, Any]:
    """The sampled tokens with their log-probabilities, in the form of completions."""
    texts = [token_text(token_id) for token_id in sampled.token_ids.tolist()]
    offsets = []
    for text in texts:
        offsets.append(offset)
        offset += len(text)
    return {
        "tokens": texts,
        "token_logprobs": sampled.logprobs.tolist(),
        "top_logprobs": None if sampled.top_ids is None else _likeliest(token_text, texts, sampled),
        "text_offset": offsets,
    }


def _likeliest(
    token_text: TokenText, texts: list[str], sampled: TokenLogprobs
) -> list[dict[str, float]]:
    """The likeliest texts of each step and the sampled one; of tokens that read alike the likeliest."""
    told: list[dict[str, float]] = []
    for text, logprob, tops in zip(texts, sampled.logprobs.tolist(), tops_of(sampled), strict=True):
        likely: dict[str, float] = {}
        for token_id, value in tops:
            likely.setdefault(token_text(token_id), value)
        likely.setdefault(text, logprob)
        told.append(likely)
    return told


class CompletionStream(OpenAIStream):
    """`StreamDialect` of completions."""

    def __init__(self, body: CompletionRequest, token_text: TokenText) -> None:
        super().__init__(body, "text_completion")
        self._completion = body
        self._token_text = token_text
        self._offsets: dict[int, int] = {}  # characters told of each choice

    def begin(self, opening: CallStart) -> bytes:
        """The prompt's ids if they were asked for."""
        more = self.opened(opening)
        return self.chunk([], **more) if more else b""

    def piece(self, piece: Piece) -> bytes:
        """Text as it comes; tokens without new text only for who wants tokens."""
        told: dict[str, Any] = {}
        if self._completion.logprobs is not None and len(piece.token_ids):
            offset = self._offsets.get(piece.index, 0)
            lists = logprob_lists(self._token_text, piece, offset)
            self._offsets[piece.index] = offset + sum(map(len, lists["tokens"]))
            told["logprobs"] = lists
        if self._completion.return_token_ids and len(piece.token_ids):
            told["token_ids"] = piece.token_ids.tolist()
        text = piece.delta.content
        return self._choice(piece.index, text, None, told) if text or told else b""

    def choice(self, choice: ReplyChoice) -> bytes:
        """The finish reason."""
        return self._choice(choice.index, "", _reason(choice), {})

    def _choice(self, index: int, text: str, reason: str | None, told: dict[str, Any]) -> bytes:
        choice = {"index": index, "text": text, "logprobs": None, "finish_reason": reason, **told}
        return self.chunk([choice])
