"""Checks of finished replies against what the request asked for.

There is no grammar engine: the model is not forced, its reply is looked at afterwards. One that was cut
by its token budget is passed on as it is, with its finish reason.
"""

from __future__ import annotations

from typing import Any

import jsonschema
import msgspec

from tailrace_gateway.core.call import Choice, Completion, Ending, Promises, ReplyFormat
from tailrace_gateway.core.errors import InvalidRequestError, UnmetPromiseError


def check_schema(promises: Promises) -> None:
    """Refuse a JSON Schema that is none, before anything is sampled."""
    if promises.json_schema is None:
        return
    try:
        jsonschema.Draft202012Validator.check_schema(promises.json_schema)
    except jsonschema.SchemaError as error:
        reason = f"response_format: no valid JSON Schema: {error.message}"
        raise InvalidRequestError(reason, param="response_format") from error


def check_promises(promises: Promises, completion: Completion) -> None:
    """Raise `UnmetPromiseError` for the first choice that keeps a promise not."""
    for choice in completion.choices:
        if choice.ending is Ending.LENGTH:
            continue
        _check_tools(promises, choice)
        if not choice.message.tool_calls:
            _check_format(promises, choice)


def _check_tools(promises: Promises, choice: Choice) -> None:
    calls = choice.message.tool_calls
    if promises.needs_tool_call and not calls:
        raise _unmet("tool_choice", "the model called no tool", choice)
    if promises.forbids_tool_calls and calls:
        raise _unmet("tool_choice", "the model called a tool", choice)
    for call in calls:
        if promises.tool_name and call.name != promises.tool_name:
            reason = f"the model called {call.name!r}, not {promises.tool_name!r}"
            raise _unmet("tool_choice", reason, choice)
    if promises.max_tool_calls is not None and len(calls) > promises.max_tool_calls:
        raise _unmet("parallel_tool_calls", f"the model made {len(calls)} calls at once", choice)


def _check_format(promises: Promises, choice: Choice) -> None:
    if promises.reply_format is ReplyFormat.TEXT:
        return
    try:
        value: Any = msgspec.json.decode(choice.message.content.encode())
    except msgspec.DecodeError as error:
        raise _unmet("response_format", f"the reply is no JSON: {error}", choice) from error
    if promises.reply_format is ReplyFormat.JSON_OBJECT and not isinstance(value, dict):
        raise _unmet("response_format", "the reply is JSON, but no object", choice)
    if promises.json_schema is not None:
        validator = jsonschema.Draft202012Validator(promises.json_schema)
        misfit = jsonschema.exceptions.best_match(validator.iter_errors(value))
        if misfit is not None:
            reason = f"the reply does not fit the schema at {misfit.json_path}: {misfit.message}"
            raise _unmet("response_format", reason, choice)


def _unmet(param: str, reason: str, choice: Choice) -> UnmetPromiseError:
    message = f"{param}: {reason}; replies are checked, not forced"
    return UnmetPromiseError(message, param=param, completion_id=choice.completion_id)
