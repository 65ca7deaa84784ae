"""Shared parts of OpenAI responses: headers, token counts, log-probabilities, errors."""

from collections.abc import Callable
from typing import Any

import numpy as np

from tailrace_gateway.core.call import CallStart, Completion, Piece, ReplyChoice
from tailrace_gateway.core.errors import ApiError
from tailrace_gateway.core.openai_request import OpenAIRequest
from tailrace_gateway.core.sse import DONE, data_event

SampledTokens = ReplyChoice | Piece
TokenText = Callable[[int], str]  # decodes one token; invalid bytes become U+FFFD
_LEAST = np.float32(-9999.0)  # OpenAI's value for impossible tokens; JSON has no -inf


def whole_answer(
    body: OpenAIRequest,
    kind: str,
    completion: Completion,
    render: Callable[[ReplyChoice], dict[str, Any]],
) -> dict[str, Any]:
    """Return the response to a request without a stream; `render` formats one choice."""
    choices = [render(choice) for choice in completion.choices]
    answer = {
        **_head(body, kind, completion.opening),
        "choices": choices,
        "usage": usage_of(completion),
    }
    if body.return_token_ids:
        answer["prompt_token_ids"] = completion.opening.prompts[0].tolist()
        for rendered, choice in zip(choices, completion.choices, strict=True):
            rendered["token_ids"] = choice.token_ids.tolist()
    return answer


class OpenAIStream:
    """Start, end and failure of a stream; subclasses encode the pieces."""

    def __init__(self, body: OpenAIRequest, kind: str) -> None:
        self._body = body
        self._kind = kind
        self._base: dict[str, Any] = {}

    def opened(self, opening: CallStart) -> dict[str, Any]:
        """Start the stream; return extra fields of its first chunk: the prompt's ids if requested."""
        self._base = _head(self._body, self._kind, opening)
        return {"prompt_token_ids": opening.prompts[0].tolist()} if self._body.return_token_ids else {}

    def chunk(self, choices: list[dict[str, Any]], **more: Any) -> bytes:
        """Encode one event."""
        return data_event({**self._base, "choices": choices, **more})

    def end(self, completion: Completion) -> bytes:
        """Encode the end, with the token counts if requested."""
        return (self.chunk([], usage=usage_of(completion)) if self._body.with_usage else b"") + DONE

    def error(self, error: ApiError) -> bytes:
        """Encode an error object in place of a chunk; the client raises it."""
        return data_event(openai_error(error))


def _head(body: OpenAIRequest, kind: str, opening: CallStart) -> dict[str, Any]:
    return {
        "id": opening.completion_id,
        "object": kind,
        "created": opening.created_unix_s,
        "model": body.model,
    }


def usage_of(completion: Completion) -> dict[str, Any]:
    """Return the token counts."""
    prompt, sampled = completion.num_prompt_tokens, completion.num_sampled
    return {
        "prompt_tokens": prompt,
        "completion_tokens": sampled,
        "total_tokens": prompt + sampled,
        "prompt_tokens_details": {"cached_tokens": completion.num_cached_tokens},
    }


def logprob_entries(
    token_text: TokenText, sampled: SampledTokens, no_bytes: list[int] | None = None
) -> list[dict[str, Any]]:
    """Return the sampled tokens with log-probabilities in the format of chat completions.

    `no_bytes` stands for the bytes of a part of a character.
    """
    return [
        _entry(token_text, token_id, logprob, no_bytes)
        | {"top_logprobs": [_entry(token_text, *likely, no_bytes) for likely in tops]}
        for token_id, logprob, tops in zip(
            sampled.token_ids.tolist(), sampled.logprobs.tolist(), tops_of(sampled), strict=True
        )
    ]


def tops_of(sampled: SampledTokens) -> list[list[tuple[int, float]]]:
    """Return the alternatives of each step as (id, log-probability); empty lists if not requested."""
    if sampled.top_ids is None or sampled.top_logprobs is None:
        return [[] for _ in range(len(sampled.token_ids))]
    logprobs = np.maximum(sampled.top_logprobs, _LEAST).tolist()
    rows = zip(sampled.top_ids.tolist(), logprobs, strict=True)
    return [list(zip(ids, values, strict=True)) for ids, values in rows]


def _entry(
    token_text: TokenText, token_id: int, logprob: float, no_bytes: list[int] | None
) -> dict[str, Any]:
    text = token_text(token_id)
    raw = no_bytes if "\ufffd" in text else list(text.encode())
    return {"token": text, "logprob": logprob, "bytes": raw}


def tool_calls_of(choice: ReplyChoice) -> list[dict[str, Any]]:
    """Return the tool calls of a reply in the format of chat completions."""
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
    """Return the body of an error response."""
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
