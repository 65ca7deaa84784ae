"""From what a tool returned or raised to the result that its caller gets (pure)."""

from __future__ import annotations

from typing import Any

import msgspec

from tailrace.foreign import ForeignCodeError
from tailrace.sdk.tool import ToolOutput, ToolSpec, ToolUnavailableError
from tailrace.tools.running import ToolTimeoutError
from tailrace_protos.tool import CallTool, ToolErrorKind, ToolResult


def result_of(request: CallTool, spec: ToolSpec, value: Any) -> ToolResult:
    """The result of a call that returned `value`: text, `ToolOutput`, None or what JSON can show."""
    try:
        output = _output(value)
    except (TypeError, ValueError, msgspec.MsgspecError, RecursionError) as error:
        reason = f"{request.name} returned what JSON cannot show ({type(value).__name__}): {error}"
        return error_result(request, ToolErrorKind.RAISED, reason)
    num_bytes = len(output.content.encode("utf-8", "surrogatepass"))
    if num_bytes > spec.max_result_bytes:
        return too_large(request, num_bytes, spec.max_result_bytes)
    return ToolResult(
        request.call_id,
        request.name,
        _encodable(output.content),
        is_error=output.is_error,
        error_kind=ToolErrorKind.REPORTED if output.is_error else ToolErrorKind.NONE,
        metrics=output.metrics,
    )


def failure_of(request: CallTool, error: ForeignCodeError | ToolTimeoutError) -> ToolResult:
    """The result of a call whose code raised or did not end."""
    if isinstance(error, ToolTimeoutError):
        text = f"{request.name} did not answer within {error.timeout_s:g} s"
        return error_result(request, ToolErrorKind.TIMEOUT, text)
    cause = error.error
    if isinstance(cause, ToolUnavailableError):
        return infra_result(request, f"{request.name} is not available: {cause}")
    text = f"{request.name} raised {type(cause).__name__}: {cause}"
    return error_result(request, ToolErrorKind.RAISED, _encodable(text))


def error_result(request: CallTool, kind: ToolErrorKind, reason: str) -> ToolResult:
    """An error that the model may read."""
    return ToolResult(request.call_id, request.name, reason, is_error=True, error_kind=kind)


def infra_result(request: CallTool, reason: str) -> ToolResult:
    """A failure that is not the model's doing."""
    return ToolResult(request.call_id, request.name, infra_error=reason)


def too_large(request: CallTool, num_bytes: int, max_bytes: int, remedy: str = "") -> ToolResult:
    """A result that cannot be carried to its caller."""
    text = f"the result of {request.name} has {num_bytes} bytes, at most {max_bytes} can be returned"
    return error_result(request, ToolErrorKind.TOO_LARGE, f"{text}{remedy}: ask for less")


def outcome_of(result: ToolResult) -> str:
    """The result in one word, for metrics."""
    if result.infra_error:
        return "infra"
    return result.error_kind.value or ("raised" if result.is_error else "ok")


def _output(value: Any) -> ToolOutput:
    if isinstance(value, ToolOutput):
        return value
    if isinstance(value, str):
        return ToolOutput(value)
    if value is None:
        return ToolOutput("")
    return ToolOutput(msgspec.json.encode(value).decode())


def _encodable(text: str) -> str:
    """The text without half surrogates, which no wire takes."""
    return text.encode("utf-8", "replace").decode()
