"""Refusals as OpenAI's clients read them."""

from __future__ import annotations

from typing import Any

from tailrace_gateway.core.errors import ApiError

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
