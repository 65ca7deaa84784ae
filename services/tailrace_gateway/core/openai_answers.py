"""What the answers of OpenAI's dialects have in common: heads, token counts, log-probabilities."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from tailrace_gateway.core.call import CallStart, Completion, ReplyChoice
from tailrace_gateway.core.errors import ApiError
from tailrace_gateway.core.openai_request import OpenAIRequest
from tailrace_gateway.core.sse import DONE, data_event

TokenText = Callable[[int], str]  # text of one token; broken characters become U+FFFD
_LEAST = np.float32(-9999.0)  # OpenAI's word for all but impossible; JSON has no -inf


class TokenLogprobs(Protocol):
    """Tokens [T] of a choice, whole or a piece, with what else each step might have said [T, k]."""

    @property
    def token_ids(self) -> NDArray[np.int32]:
        """Sampled."""

    @property
    def logprobs(self) -> NDArray[np.float32]:
        """Of those."""

    @property
    def top_ids(self) -> NDArray[np.int32] | None:
        """The likeliest first; None: not asked for."""

    @property
    def top_logprobs(self) -> NDArray[np.float32] | None:
        """Of those."""


def whole_answer(
    body: OpenAIRequest,
    kind: str,
    completion: Completion,
    tell: Callable[[ReplyChoice], dict[str, Any]],
) -> dict[str, Any]:
    """The answer to a request that does not stream; `tell` gives what is the dialect's of a choice."""
    choices = [tell(choice) for choice in completion.choices]
    answer = {
        **_head(body, kind, completion.opening),
        "choices": choices,
        "usage": usage_of(completion),
    }
    if body.return_token_ids:
        answer["prompt_token_ids"] = completion.opening.prompt_ids.tolist()
        for told, choice in zip(choices, completion.choices, strict=True):
            told["token_ids"] = choice.token_ids.tolist()
    return answer


class OpenAIStream:
    """A stream's head, its end and its failure; what stands between is the dialect's."""

    def __init__(self, body: OpenAIRequest, kind: str) -> None:
        self._body = body
        self._kind = kind
        self._base: dict[str, Any] = {}

    def opened(self, opening: CallStart) -> dict[str, Any]:
        """Begin; what the first chunk tells besides, the prompt's ids if they were asked for."""
        self._base = _head(self._body, self._kind, opening)
        return {"prompt_token_ids": opening.prompt_ids.tolist()} if self._body.return_token_ids else {}

    def chunk(self, choices: list[dict[str, Any]], **more: Any) -> bytes:
        """One event."""
        return data_event({**self._base, "choices": choices, **more})

    def end(self, completion: Completion) -> bytes:
        """Usage if it was asked for."""
        return (self.chunk([], usage=usage_of(completion)) if self._body.with_usage else b"") + DONE

    def error(self, error: ApiError) -> bytes:
        """An error object in place of a chunk, which the client raises."""
        return data_event(openai_error(error))


def _head(body: OpenAIRequest, kind: str, opening: CallStart) -> dict[str, Any]:
    return {
        "id": opening.completion_id,
        "object": kind,
        "created": opening.created_unix_s,
        "model": body.model,
    }


def usage_of(completion: Completion) -> dict[str, Any]:
    """Token counts."""
    prompt, sampled = completion.num_prompt_tokens, completion.num_sampled
    return {
        "prompt_tokens": prompt,
        "completion_tokens": sampled,
        "total_tokens": prompt + sampled,
        "prompt_tokens_details": {"cached_tokens": completion.num_cached_tokens},
    }


def logprob_entries(token_text: TokenText, sampled: TokenLogprobs) -> list[dict[str, Any]]:
    """The sampled tokens with their log-probabilities, in the form of chat completions."""
    return [
        _entry(token_text, token_id, logprob)
        | {"top_logprobs": [_entry(token_text, *likely) for likely in tops]}
        for token_id, logprob, tops in zip(
            sampled.token_ids.tolist(), sampled.logprobs.tolist(), tops_of(sampled), strict=True
        )
    ]


def tops_of(sampled: TokenLogprobs) -> list[list[tuple[int, float]]]:
    """The likeliest ids of each step with their log-probabilities; none where nobody asked."""
    if sampled.top_ids is None or sampled.top_logprobs is None:
        return [[] for _ in range(len(sampled.token_ids))]
    logprobs = np.maximum(sampled.top_logprobs, _LEAST).tolist()
    rows = zip(sampled.top_ids.tolist(), logprobs, strict=True)
    return [list(zip(ids, values, strict=True)) for ids, values in rows]


def _entry(token_text: TokenText, token_id: int, logprob: float) -> dict[str, Any]:
    text = token_text(token_id)
    raw = None if "\ufffd" in text else list(text.encode())
    return {"token": text, "logprob": logprob, "bytes": raw}


def tool_calls_of(choice: ReplyChoice) -> list[dict[str, Any]]:
    """A reply's tool calls in the form of chat completions."""
    return [
        {
            "id": call.id,
            "type": "function",
            "function": {"name": call.name, "arguments": call.arguments},
        }
        for call in choice.message.tool_calls
    ]


_TYPES = {401: "invalid_request_error", 403: "permission_error", 429: "rate_limit_error"}


def openai_error(error: ApiError) -> dict[str, Any]:
    """The body of an error answer."""
    kind = _TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "server_error")
    content: dict[str, Any] = {
        "message": error.message,
        "type": kind,
        "param": error.param or None,
        "code": error.code,
    }
    completion_id = getattr(error, "completion_id", "")
    if completion_id:
        content["completion_id"] = completion_id
    return {"error": content}
