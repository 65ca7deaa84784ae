"""Errors of the gateway, independent of the dialect: problem, field, and whether a retry can help.

Each dialect renders them as its clients expect; all dialects use the HTTP status in `status`.
"""

from collections.abc import Sequence


class ApiError(Exception):
    """Error that the client receives. `param` names the field at fault, `code` is for programs.

    `retry_after_s` is None if the same request would fail again.
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
    """The request is malformed, or requests something that the gateway cannot provide."""


class UnsupportedError(BadRequestError, code="unsupported_parameter"):
    """The request uses a field that the gateway does not support."""


class NoThreadsError(UnsupportedError):
    """The request asks the gateway to hold its conversation.

    Anthropic's client reads `details` and sends the whole conversation instead.
    """

    def __init__(self) -> None:
        reason = "thread: the gateway holds no threads: send all messages of the conversation"
        super().__init__(reason, param="thread")
        self.details = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}


class ContextOverflowError(ApiError, code="context_length_exceeded"):
    """The conversation exceeds the session's length limit. Attributes: `num_tokens`, `limit_tokens`."""

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
    """The session has no tokens left to sample. Attributes: `num_sampled`, `limit_tokens`."""

    def __init__(self, num_sampled: int, limit_tokens: int) -> None:
        super().__init__(
            f"the session may sample {limit_tokens} tokens over all its calls and has sampled "
            f"{num_sampled}: the episode is over"
        )
        self.num_sampled = num_sampled
        self.limit_tokens = limit_tokens


class UnauthorizedError(ApiError, status=401, code="invalid_api_key"):
    """The request has no key, or an unknown one."""


class ForbiddenError(ApiError, status=403, code="permission_denied"):
    """The key is valid, but not for this operation."""


class NotFoundError(ApiError, status=404, code="not_found"):
    """The route or the object does not exist."""


class MethodError(ApiError, status=405, code="method_not_allowed"):
    """The path exists, but not with this method. Attribute: `allowed`, its methods."""

    def __init__(self, method: str, path: str, allowed: Sequence[str]) -> None:
        self.allowed = ", ".join(allowed)
        super().__init__(f"{method} is not for {path}, only {self.allowed}")


class ConflictError(ApiError, status=409, code="conflict"):
    """The object is in another state than the request needs."""


class SessionOverError(ApiError, status=410, code="session_closed"):
    """The session was closed or exported, or its deadline has passed."""


class SessionCorruptedError(ApiError, status=410, code="session_corrupted"):
    """The stored session cannot be decoded. It is set aside; its id may be opened again."""


class TooLargeError(ApiError, status=413, code="request_too_large"):
    """The body exceeds `gateway.max_body_bytes`."""


class OutputConstraintError(ApiError, status=422):
    """The reply of the model violates a constraint of the request.

    The ledger keeps the reply; `completion_id` names it.
    """

    def __init__(self, reason: str, *, param: str, completion_id: str) -> None:
        message = f"{param}: {reason}; replies are checked, not forced"
        super().__init__(message, param=param, code=f"{param}_not_met")
        self.completion_id = completion_id


class OverloadedError(ApiError, status=429, code="rate_limit_exceeded"):
    """This replica has too many calls in flight."""


class UnavailableError(ApiError, status=503, code="service_unavailable"):
    """The inference servers or Redis are unavailable, or this replica is draining."""


class InternalError(ApiError, status=500, code="internal_error"):
    """The gateway has a defect; its log has the details."""
