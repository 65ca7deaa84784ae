"""OpenAI's completions: a prompt of token ids or bare text, continued as it is.

Callers who keep tokens themselves use this with `return_token_ids`: what they send on is matched by its
exact ids. `max_tokens` left out means what is left of the session, not 16.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from tailrace_gateway.core.body import Body, read_body, refuse, require_range
from tailrace_gateway.core.call import Choice, Completion, Ending, ModelCall, Opening, Piece
from tailrace_gateway.core.errors import ApiError, InvalidRequestError, UnsupportedError
from tailrace_gateway.core.openai_chat import StreamOptions, num_choices, require_sampling, wishes
from tailrace_gateway.core.openai_errors import openai_error
from tailrace_gateway.core.openai_fields import TokenText, usage_of
from tailrace_gateway.core.sse import DONE, data_event

_MAX_ID = (1 << 31) - 1


class CompletionRequest(Body, frozen=True, kw_only=True):
    """The body of a completion. The second half is refused unless it changes nothing."""

    prompt: str | list[str | int | list[int]]
    model: str = ""
    max_tokens: int | None = None
    n: int | None = None
    stop: str | list[str] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    logprobs: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None

    echo: bool | None = None
    suffix: str | None = None
    best_of: int | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    user: str | None = None


def read_completion(raw: bytes) -> tuple[CompletionRequest, ModelCall]:
    """The request and what it asks of the model; raises `InvalidRequestError`."""
    body = read_body(raw, CompletionRequest)
    refuse(
        body,
        ("echo", (None, False)),
        ("suffix", (None, "")),
        ("best_of", (None, 1)),
        ("frequency_penalty", (None, 0)),
        ("presence_penalty", (None, 0)),
        ("logit_bias", (None, {})),
    )
    require_sampling(body)
    require_range(body, "max_tokens", 1, 1 << 31)
    if body.logprobs:
        reason = "logprobs: the engine keeps the sampled token's log-probability only; use 0"
        raise UnsupportedError(reason, param="logprobs")
    text, ids = _prompt(body.prompt)
    return body, ModelCall(
        prompt_text=text,
        prompt_ids=ids,
        num_choices=num_choices(body),
        max_new_tokens=body.max_tokens,
        sampling=wishes(body),
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
        raise InvalidRequestError("prompt: token ids must not be negative", param="prompt")
    return "", np.array(ids, np.int32)


def completion_answer(
    body: CompletionRequest, completion: Completion, tokens: TokenText
) -> dict[str, Any]:
    """The answer to a request that does not stream."""
    opening = completion.opening
    answer: dict[str, Any] = {
        "id": opening.completion_id,
        "object": "text_completion",
        "created": opening.created_unix_s,
        "model": body.model,
        "choices": [_choice(body, choice, tokens) for choice in completion.choices],
        "usage": usage_of(completion),
    }
    if body.return_token_ids:
        answer["prompt_token_ids"] = opening.prompt_ids.tolist()
    return answer


def _choice(body: CompletionRequest, choice: Choice, tokens: TokenText) -> dict[str, Any]:
    told: dict[str, Any] = {
        "index": choice.index,
        "text": choice.message.content,
        "logprobs": None,
        "finish_reason": _reason(choice),
    }
    if body.logprobs is not None:
        told["logprobs"] = logprob_lists(tokens, choice.token_ids, choice.logprobs, 0)
    if body.return_token_ids:
        told["token_ids"] = choice.token_ids.tolist()
    return told


def _reason(choice: Choice) -> str:
    return "length" if choice.ending is Ending.LENGTH else "stop"


def logprob_lists(
    tokens: TokenText, token_ids: NDArray[np.int32], logprobs: NDArray[np.float32], offset: int
) -> dict[str, Any]:
    """The sampled tokens with their log-probabilities, in the form of completions."""
    texts = [tokens.token_text(token_id) for token_id in token_ids.tolist()]
    offsets = []
    for text in texts:
        offsets.append(offset)
        offset += len(text)
    return {
        "tokens": texts,
        "token_logprobs": logprobs.tolist(),
        "top_logprobs": None,
        "text_offset": offsets,
    }


class CompletionStream:
    """`StreamDialect` of completions."""

    def __init__(self, body: CompletionRequest, tokens: TokenText) -> None:
        self._body = body
        self._tokens = tokens
        self._with_usage = body.stream_options is not None and body.stream_options.include_usage
        self._base: dict[str, Any] = {}
        self._offsets: dict[int, int] = {}  # characters told of each choice

    def begin(self, opening: Opening) -> bytes:
        """The prompt's ids if they were asked for."""
        self._base = {
            "id": opening.completion_id,
            "object": "text_completion",
            "created": opening.created_unix_s,
            "model": self._body.model,
        }
        if not self._body.return_token_ids:
            return b""
        more = {"prompt_token_ids": opening.prompt_ids.tolist()}
        return data_event({**self._base, "choices": [], **more})

    def piece(self, piece: Piece) -> bytes:
        """Text as it comes; tokens without new text only for who wants tokens."""
        told: dict[str, Any] = {}
        if self._body.logprobs is not None and len(piece.token_ids):
            offset = self._offsets.get(piece.index, 0)
            lists = logprob_lists(self._tokens, piece.token_ids, piece.logprobs, offset)
            self._offsets[piece.index] = offset + sum(map(len, lists["tokens"]))
            told["logprobs"] = lists
        if self._body.return_token_ids and len(piece.token_ids):
            told["token_ids"] = piece.token_ids.tolist()
        text = piece.delta.content
        return self._chunk(piece.index, text, None, told) if text or told else b""

    def choice(self, choice: Choice) -> bytes:
        """The finish reason."""
        return self._chunk(choice.index, "", _reason(choice), {})

    def end(self, completion: Completion) -> bytes:
        """Usage if it was asked for."""
        if not self._with_usage:
            return DONE
        return data_event({**self._base, "choices": [], "usage": usage_of(completion)}) + DONE

    def error(self, error: ApiError) -> bytes:
        """An error object in place of a chunk, which the client raises."""
        return data_event(openai_error(error))

    def _chunk(self, index: int, text: str, reason: str | None, told: dict[str, Any]) -> bytes:
        choice = {"index": index, "text": text, "logprobs": None, "finish_reason": reason, **told}
        return data_event({**self._base, "choices": [choice]})
