"""Calls from one process to tools in another, through a real nats-server."""

from __future__ import annotations

from tailrace.sdk.tool import tool
from tailrace.tools import ToolClient, ToolErrorKind
from tailrace_protos.chat import ToolCall
from tests.integration.tools.conftest import Serve


@tool
def add(a: int, b: int = 1) -> int:
    """Add two numbers."""
    return a + b


async def test_a_function_is_called_with_its_arguments(client: ToolClient, serve: Serve) -> None:
    await serve(add)
    async with client.session("e1", ["add"]) as tools:
        result = await tools.call(ToolCall("c1", "add", '{"a": 2, "b": 3}'))
    assert (result.call_id, result.name, result.content) == ("c1", "add", "5")
    assert not result.is_error
    assert result.infra_error == ""


async def test_arguments_that_do_not_fit_are_explained_to_the_model(
    client: ToolClient, serve: Serve
) -> None:
    await serve(add)
    async with client.session("e1", ["add"]) as tools:
        results = [
            await tools.call(ToolCall("c", "add", arguments))
            for arguments in ('{"a": "two"}', "{}", '{"a": 1, "c": 2}', '{"a": ', "[1]")
        ]
    assert all(result.is_error for result in results)
    assert {result.error_kind for result in results} == {ToolErrorKind.INVALID_ARGUMENTS}
    assert "Expected `int`, got `str` - at `a`" in results[0].content
    assert "missing required field `a`" in results[1].content
    assert "unknown field `c`" in results[2].content
    assert "not valid JSON" in results[3].content
    assert "must be a JSON object, found an array" in results[4].content
