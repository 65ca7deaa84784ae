"""Guides of calls: a schema that cannot be written as JSON is refused by its field."""

from __future__ import annotations

from typing import Any

import pytest

from tailrace_gateway.core.call import ModelCall, OutputConstraints, ReplyFormat
from tailrace_gateway.core.errors import BadRequestError
from tailrace_gateway.core.guides import guide_of
from tailrace_protos.chat import ChatMessage, ToolSchema
from tests.unit.tailrace.chat.families import QWEN, renderer


def nested() -> dict[str, Any]:
    """Schema with a default that is deeper than Python's stack."""
    value: dict[str, Any] = {}
    for _ in range(5000):
        value = {"default": value}
    return value


@pytest.mark.parametrize("param", ["response_format", "tools"])
def test_a_schema_that_is_nested_too_deeply_is_refused_by_its_field(param: str) -> None:
    if param == "tools":
        constraints = OutputConstraints(needs_tool_call=True)
        tools = (ToolSchema("f", "", nested()),)
    else:
        constraints = OutputConstraints(reply_format=ReplyFormat.JSON_SCHEMA, json_schema=nested())
        tools = ()
    call = ModelCall(messages=(ChatMessage("user", "go"),), tools=tools, constraints=constraints)
    with pytest.raises(BadRequestError, match=f"^{param}: a schema is nested too deeply") as refused:
        guide_of(call, renderer(QWEN), "required")
    assert refused.value.param == param
