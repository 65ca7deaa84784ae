"""Conversion of a model's text to arguments, and of a tool's value or error to a result (pure)."""

import math
from collections.abc import Callable
from typing import Any

import jsonschema
import jsonschema.protocols
import jsonschema.validators
import msgspec
from referencing import Registry
from referencing.exceptions import Unresolvable

from tailrace.cpu_limit import TooSlowError, cpu_limit
from tailrace.foreign import ForeignCodeError, encodable, told
from tailrace.sdk.env import NUMBER
from tailrace.sdk.tool import (
    ArgumentsError,
    FunctionTool,
    ToolOffer,
    ToolOutput,
    ToolSpec,
    ToolUnavailableError,
)
from tailrace.tools.running import ToolTimeoutError
from tailrace_protos.tool import CallTool, ToolErrorKind, ToolResult

_MAX_REASONS = 3
_MAX_REASON_CHARS = 300
_MAX_CHECK_S = 1.0  # in which the worker answers nobody else
Check = Callable[[dict[str, Any]], dict[str, Any]]


class BrokenSchemaError(Exception):
    """No arguments can be checked by a tool's schema; the text gives the reason."""


def parse_arguments(text: str) -> dict[str, Any]:
    """Parses the JSON object of a model; empty text is an empty object. Raises `ArgumentsError`."""
    if not text.strip():
        return {}
    try:
        value = msgspec.json.decode(text.encode("utf-8", "surrogatepass"))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ArgumentsError(f"the arguments are not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ArgumentsError(f"the arguments must be a JSON object, found {_kind(value)}")
    return value


def checker(offer: FunctionTool | ToolOffer) -> Check:
    """Returns the check that converts arguments for the tool's code.

    It raises `ArgumentsError` and `BrokenSchemaError`. `ValueError` for an invalid JSON Schema.
    """
    if isinstance(offer, FunctionTool):
        return offer.bind
    schema = offer.spec.parameters or {"type": "object"}
    kind = jsonschema.validators.validator_for(schema)
    try:
        kind.check_schema(schema)
    except (jsonschema.SchemaError, RecursionError) as error:
        reason = error.message if isinstance(error, jsonschema.SchemaError) else "nested too deeply"
        raise ValueError(
            f"tool {offer.spec.name!r}: parameters are not a JSON Schema: {reason}"
        ) from error
    validator = kind(schema, registry=Registry())  # its own: none that asks the network
    return lambda arguments: _validated(validator, arguments)


def _validated(validator: jsonschema.protocols.Validator, arguments: dict[str, Any]) -> dict[str, Any]:
    try:
        with cpu_limit(_MAX_CHECK_S):
            errors = sorted(validator.iter_errors(arguments), key=lambda error: error.json_path)
    except Unresolvable as error:
        raise BrokenSchemaError(
            f"the schema of its parameters has a reference to nothing: {error}"
        ) from error
    except RecursionError as error:
        raise ArgumentsError("they are nested too deeply") from error
    except TooSlowError as error:
        raise ArgumentsError(f"their check by the schema takes more than {_MAX_CHECK_S:g} s") from error
    if errors:
        raise ArgumentsError("; ".join(map(_reason, errors[:_MAX_REASONS])))
    return arguments


def _reason(error: jsonschema.ValidationError) -> str:
    place = error.json_path.removeprefix("$").removeprefix(".")
    text = error.message
    if len(text) > _MAX_REASON_CHARS:
        text = text[:_MAX_REASON_CHARS] + "..."
    return f"{text} - at `{place}`" if place else text


def _kind(value: Any) -> str:
    names = {list: "an array", str: "a string", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "a number")


def result_of(request: CallTool, spec: ToolSpec, value: Any) -> ToolResult:
    """Returns the result of a call that returned `value`: text, `ToolOutput`, None or a JSON value."""
    try:
        output = _output(value)
        metrics = _metrics(output)
    except (TypeError, ValueError, msgspec.MsgspecError, RecursionError) as error:
        reason = (
            f"{request.name} returned a value that cannot be sent ({type(value).__name__}): {error}"
        )
        return error_result(request, ToolErrorKind.RAISED, reason)
    num_bytes = len(output.content.encode("utf-8", "surrogatepass"))
    if num_bytes > spec.max_result_bytes:
        return too_large(request, num_bytes, spec.max_result_bytes)
    return ToolResult(
        request.call_id,
        request.name,
        encodable(output.content),
        is_error=bool(output.is_error),
        error_kind=ToolErrorKind.REPORTED if output.is_error else ToolErrorKind.NONE,
        metrics=metrics,
    )


def failure_of(request: CallTool, error: ForeignCodeError | ToolTimeoutError) -> ToolResult:
    """Returns the result of a call whose code raised or did not end."""
    if isinstance(error, ToolTimeoutError):
        text = f"{request.name} did not answer within {error.timeout_s:g} s"
        return error_result(request, ToolErrorKind.TIMEOUT, text)
    cause = error.error
    if isinstance(cause, ToolUnavailableError):
        return infra_result(request, f"{request.name} is not available: {encodable(str(cause))}")
    return error_result(request, ToolErrorKind.RAISED, f"{request.name} raised {told(cause)}")


def error_result(request: CallTool, kind: ToolErrorKind, reason: str) -> ToolResult:
    """Returns an error for the model."""
    return ToolResult(request.call_id, request.name, reason, is_error=True, error_kind=kind)


def infra_result(request: CallTool, reason: str) -> ToolResult:
    """Returns a failure of the infrastructure."""
    return ToolResult(request.call_id, request.name, infra_error=reason)


def too_large(request: CallTool, num_bytes: int, max_bytes: int, remedy: str = "") -> ToolResult:
    """Returns the error for a result that is too large for its caller."""
    text = f"the result of {request.name} has {num_bytes} bytes, at most {max_bytes} can be returned"
    return error_result(request, ToolErrorKind.TOO_LARGE, f"{text}{remedy}: ask for less")


def outcome_of(result: ToolResult) -> str:
    """Returns the outcome of a result, for metrics."""
    if result.infra_error:
        return "infra"
    return result.error_kind.value or ("raised" if result.is_error else "ok")


def _output(value: Any) -> ToolOutput:
    if isinstance(value, ToolOutput):
        if not isinstance(value.content, str):
            raise TypeError(f"content must be text, found {type(value.content).__name__}")
        return value
    if isinstance(value, str):
        return ToolOutput(value)
    if value is None:
        return ToolOutput("")
    return ToolOutput(msgspec.json.encode(value).decode())


def _metrics(output: ToolOutput) -> dict[str, float]:
    for name, value in output.metrics.items():
        if not isinstance(name, str) or not isinstance(value, NUMBER) or not math.isfinite(value):
            raise ValueError(f"metrics must be finite numbers by name, found {name!r}: {value!r}")
    return {name: float(value) for name, value in output.metrics.items()}
