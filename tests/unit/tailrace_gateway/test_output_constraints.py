"""Formats of replies: a schema that is not valid is refused by the field that the request has."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from tailrace_gateway.core.anthropic_messages import read_messages_request
from tailrace_gateway.core.call import ModelCall
from tailrace_gateway.core.errors import BadRequestError
from tailrace_gateway.core.openai_chat import read_chat
from tailrace_gateway.core.openai_completions import read_completion
from tailrace_gateway.core.openai_responses import read_response
from tailrace_gateway.core.output_constraints import check_schema

USER = [{"role": "user", "content": "Hi"}]
SCHEMAS = [{"type": "made_up"}, {"$ref": "#/$defs/missing"}]


def in_chat(schema: Any) -> dict[str, Any]:
    nested = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    return {"messages": USER, "response_format": nested}


def in_completion(schema: Any) -> dict[str, Any]:
    return {"prompt": "x", "response_format": in_chat(schema)["response_format"]}


def in_response(schema: Any) -> dict[str, Any]:
    return {"input": "x", "text": {"format": {"type": "json_schema", "name": "a", "schema": schema}}}


def in_messages(schema: Any) -> dict[str, Any]:
    wanted = {"format": {"type": "json_schema", "schema": schema}}
    return {"messages": USER, "max_tokens": 5, "output_config": wanted}


@pytest.mark.parametrize("schema", SCHEMAS)
@pytest.mark.parametrize(
    ("read", "body", "param"),
    [
        (read_chat, in_chat, "response_format"),
        (read_completion, in_completion, "response_format"),
        (read_response, in_response, "text.format"),
        (read_messages_request, in_messages, "output_config.format"),
    ],
)
def test_a_schema_that_is_not_valid_is_refused_by_its_field(
    read: Callable[[bytes], tuple[Any, ModelCall]],
    body: Callable[[Any], dict[str, Any]],
    param: str,
    schema: Any,
) -> None:
    _, call = read(json.dumps(body(schema)).encode())
    with pytest.raises(BadRequestError, match=f"^{param}: ") as refused:
        check_schema(call.constraints)
    assert refused.value.param == param
