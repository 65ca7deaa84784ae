"""Refusals of the gateway, free of any dialect: what is wrong, where, and whether to ask again.

A dialect turns them into the body that its clients expect; `status` is the HTTP status for all.
"""

from __future__ import annotations


class ApiError(Exception):
    """A refusal. `param` names the field at fault, `code` is for programs.

    `retry_after_s` is None where the same request would be refused again.
    """

    status = 400
    code = "invalid_request"

    def __init_subclass__(cls, *, status: int = 0, code: str = "") -> None:
        super().__init_subclass__()
        cls.status = status or cls.status
        cls.code = code or cls.code

    def __init__(
        self, message: str, *, param: str = "", code: str = "", retry_after_s: float | None = None
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code or self.code
        self.retry_after_s = retry_after_s


class BadRequestError(ApiError):
    """The request is wrong in itself, or asks for what cannot be had here."""


class UnsupportedError(BadRequestError, code="unsupported_parameter"):
    """A field of the dialect that the gateway does not honour, so that it is refused."""


class ContextOverflowError(ApiError, code="context_length_exceeded"):
    """The conversation is longer than the session allows. Attributes: `num_tokens`, `limit_tokens`."""

    def __init__(self, num_tokens: int, limit_tokens: int) -> None:
        super().__init__(
            f"This model's maximum context length is {limit_tokens} tokens. However, your messages "
            f"resulted in {num_tokens} tokens, and a reply needs at least one more. Please shorten the "
            "conversation.",
            param="messages",
        )
        self.num_tokens = num_tokens
        self.limit_tokens = limit_tokens


class BudgetSpentError(ApiError, code="token_budget_exceeded"):
    """The session sampled all that it may. Attributes: `num_sampled`, `limit_tokens`."""

    def __init__(self, num_sampled: int, limit_tokens: int) -> None:
        super().__init__(
            f"the session may sample {limit_tokens} tokens over all its calls and has sampled "
            f"{num_sampled}: the episode is over"
        )
        self.num_sampled = num_sampled
        self.limit_tokens = limit_tokens


class UnauthorizedError(ApiError, status=401, code="invalid_api_key"):
    """No key, or one that opens nothing."""


class ForbiddenError(ApiError, status=403, code="permission_denied"):
    """The key is good, but not for this."""


class NotFoundError(ApiError, status=404, code="not_found"):
    """No such route or object."""


class SessionOverError(ApiError, status=410, code="session_closed"):
    """The session was closed or exported, or its deadline has passed."""


class TooLargeError(ApiError, status=413, code="request_too_large"):
    """The body has more bytes than `gateway.max_body_bytes`."""


class OutputConstraintError(ApiError, status=422):
    """The model's reply does not keep what the request asked it to promise.

    The reply is in the ledger like any other; `completion_id` names it.
    """

    def __init__(self, message: str, *, param: str, completion_id: str) -> None:
        super().__init__(message, param=param, code=f"{param}_not_met")
        self.completion_id = completion_id


class OverloadedError(ApiError, status=429, code="rate_limit_exceeded"):
    """Too many calls at once in this replica."""


class UnavailableError(ApiError, status=503, code="service_unavailable"):
    """Something behind the gateway is away: inference servers, Redis, or this replica drains."""


class InternalError(ApiError, status=500, code="internal_error"):
    """A defect of the gateway, which its log describes."""
