"""Refusals as Anthropic's clients read them."""

from __future__ import annotations

from typing import Any

from tailrace_gateway.core.errors import ApiError, ContextOverflowError

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",
}


def anthropic_error(error: ApiError) -> dict[str, Any]:
    """The body of an error answer; `code` and `param` say what the message says, for programs."""
    message = error.message
    if isinstance(error, ContextOverflowError):
        message = f"prompt is too long: {error.num_tokens} tokens > {error.limit_tokens} maximum"
    content: dict[str, Any] = {
        "type": _TYPES.get(error.status, "invalid_request_error"),
        "message": message,
        "code": error.code,
    }
    if error.param:
        content["param"] = error.param
    completion_id = getattr(error, "completion_id", "")
    if completion_id:
        content["completion_id"] = completion_id
    return {"type": "error", "error": content}
