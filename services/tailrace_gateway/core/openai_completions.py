"""OpenAI's completions: prompts of token ids or plain text, continued as they are.

Clients that manage tokens themselves use it with `return_token_ids`; the gateway matches their prompts
by exact ids. Without `max_tokens` the limit is the session's remaining budget, not 16.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from tailrace_gateway.core.body import DefaultOnly, NumberRanges, read_body
from tailrace_gateway.core.call import CallStart, Completion, ModelCall, Piece, ReplyChoice, StopReason
from tailrace_gateway.core.errors import BadRequestError
from tailrace_gateway.core.openai_answers import (
    OpenAIStream,
    SampledTokens,
    TokenText,
    tops_of,
    whole_answer,
)
from tailrace_gateway.core.openai_request import MAX_CHOICES, OpenAIRequest, read_constraints
from tailrace_gateway.core.openai_sampling import MAX_ID

_DEFAULT_ONLY = DefaultOnly(suffix=("",), prompt_embeds=([],))
_RANGES = NumberRanges(logprobs=(0, 5))


class CompletionRequest(OpenAIRequest, frozen=True, kw_only=True):
    """Body of a completion. Fields of the second group are accepted only without effect."""

    prompt: str | list[str | int | list[int]]
    logprobs: int | None = None
    response_format: dict[str, Any] | None = None

    suffix: str | None = None
    prompt_embeds: Any = None


def read_completion(raw: bytes) -> tuple[CompletionRequest, ModelCall]:
    """Parse a request; return its body and its model call. Raise `BadRequestError`."""
    body = read_body(raw, CompletionRequest)
    body.require_shared()
    _DEFAULT_ONLY.require(body)
    _RANGES.require(body)
    prompts = _prompts(body.prompt)
    if len(prompts) * body.num_choices > MAX_CHOICES:
        raise BadRequestError(f"prompt: at most {MAX_CHOICES} choices over all prompts", param="prompt")
    return body, ModelCall(
        prompts=prompts,
        num_choices=body.num_choices,
        max_new_tokens=body.max_tokens,
        top_logprobs=body.logprobs or 0,
        sampling=body.overrides(),
        constraints=read_constraints(None, None, (), body.response_format),
    )


def _prompts(given: str | list[str | int | list[int]]) -> tuple[NDArray[np.int32] | str, ...]:
    """Return the prompts as texts or as ids: one text, one list of ids, or a list of either."""
    if isinstance(given, str):
        return (given,)
    kinds = set(map(type, given))
    if len(kinds) != 1:
        reason = "prompt: a text, token ids, or a list of texts or of token ids; not mixed, not empty"
        raise BadRequestError(reason, param="prompt")
    rows: list[Any] = [given] if kinds == {int} else given
    return tuple(row if isinstance(row, str) else _ids(row) for row in rows)


def _ids(row: list[int]) -> NDArray[np.int32]:
    if not all(0 <= one <= MAX_ID for one in row):
        raise BadRequestError(f"prompt: a token id is not between 0 and {MAX_ID}", param="prompt")
    return np.array(row, np.int32)


def completion_answer(
    body: CompletionRequest, completion: Completion, token_text: TokenText
) -> dict[str, Any]:
    """Return the response to a request without a stream."""

    def render(choice: ReplyChoice) -> dict[str, Any]:
        fields: dict[str, Any] = {
            "index": choice.index,
            "text": choice.message.content,
            "logprobs": None,
            "finish_reason": _reason(choice),
        }
        if body.logprobs is not None:
            fields["logprobs"] = logprob_lists(token_text, choice, 0)
        if body.return_token_ids:
            fields["prompt_token_ids"] = completion.prompt_of(choice).tolist()
        return fields

    return whole_answer(body, "text_completion", completion, render)


def _reason(choice: ReplyChoice) -> str:
    return "length" if choice.stop_reason is StopReason.LENGTH else "stop"


def logprob_lists(token_text: TokenText, sampled: SampledTokens, offset: int) -> dict[str, Any]:
    """Return the sampled tokens with log-probabilities in the format of completions."""
    texts = [token_text(token_id) for token_id in sampled.token_ids.tolist()]
    offsets = []
    for text in texts:
        offsets.append(offset)
        offset += len(text)
    return {
        "tokens": texts,
        "token_logprobs": sampled.logprobs.tolist(),
        "top_logprobs": _likeliest(token_text, texts, sampled),
        "text_offset": offsets,
    }


def _likeliest(
    token_text: TokenText, texts: list[str], sampled: SampledTokens
) -> list[dict[str, float]]:
    """Return the alternatives of each step by text, with the sampled one; equal texts keep the
    likeliest."""
    rows: list[dict[str, float]] = []
    for text, logprob, tops in zip(texts, sampled.logprobs.tolist(), tops_of(sampled), strict=True):
        likely: dict[str, float] = {}
        for token_id, value in tops:
            likely.setdefault(token_text(token_id), value)
        likely.setdefault(text, logprob)
        rows.append(likely)
    return rows


class CompletionStream(OpenAIStream):
    """`StreamDialect` of completions."""

    def __init__(self, body: CompletionRequest, token_text: TokenText) -> None:
        super().__init__(body, "text_completion")
        self._completion = body
        self._token_text = token_text
        self._offsets: dict[int, int] = {}  # number of characters sent, by choice
        self._prompts: dict[int, list[int]] = {}  # ids that were not sent yet, by choice

    def begin(self, opening: CallStart) -> bytes:
        """Encode nothing: the first event of each choice has the ids of its prompt if requested."""
        self.opened(opening)
        if self._completion.return_token_ids:
            num_choices = self._completion.num_choices
            prompts = [ids for ids in opening.prompts for _ in range(num_choices)]
            self._prompts = {index: ids.tolist() for index, ids in enumerate(prompts)}
        return b""

    def piece(self, piece: Piece) -> bytes:
        """Encode new text; tokens without text only if the client requested tokens."""
        fields: dict[str, Any] = {}
        if self._completion.logprobs is not None and len(piece.token_ids):
            offset = self._offsets.get(piece.index, 0)
            lists = logprob_lists(self._token_text, piece, offset)
            self._offsets[piece.index] = offset + sum(map(len, lists["tokens"]))
            fields["logprobs"] = lists
        if self._completion.return_token_ids and len(piece.token_ids):
            fields["token_ids"] = piece.token_ids.tolist()
        text = piece.delta.content
        return self._choice(piece.index, text, None, fields) if text or fields else b""

    def choice(self, choice: ReplyChoice) -> bytes:
        """Encode the finish reason."""
        return self._choice(choice.index, "", _reason(choice), {})

    def _choice(self, index: int, text: str, reason: str | None, fields: dict[str, Any]) -> bytes:
        choice = {"index": index, "text": text, "logprobs": None, "finish_reason": reason, **fields}
        if index in self._prompts:
            choice["prompt_token_ids"] = self._prompts.pop(index)
        return self.chunk([choice])
