"""A gateway that reads tool calls with a parser from a user's folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from tailrace.config import ConfigError
from tests.world.gateway import GatewayWorld

PARSER = '''
import re

from tailrace.chat import CallCollector, ToolParser, make_call


class AngleParser(ToolParser):
    """Calls such as <<weather {"city": "Ulm"}>>."""

    begins = ("<<",)

    def parse(self, text, tools):
        found, at = CallCollector(), 0
        for call in re.finditer(r"<<(\\w+) (.*?)>>", text, re.DOTALL):
            found.text(text[at : call.start()])
            found.block(call.group(), lambda: [make_call(*call.groups())])
            at = call.end()
        found.text(text[at:])
        return found.parsed()
'''


async def test_an_agent_gets_the_calls_that_a_parser_of_the_user_finds(
    empty_world: GatewayWorld, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "angle_parser_of_a_user.py").write_text(PARSER)
    monkeypatch.syspath_prepend(tmp_path)
    empty_world.run_settings["chat"] = {"tool_parser": "angle_parser_of_a_user:AngleParser"}
    await empty_world.start_gateway()
    said = 'I look. <<weather {"city": "Ulm"}>>'
    empty_world.model.reply = lambda prompt, _: "Sunny." if "clear sky" in prompt else said
    client = empty_world.openai(await empty_world.open())
    tool = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
    asked = {"role": "user", "content": "Weather?"}
    first = await client.chat.completions.create(model="any", messages=[asked], tools=[tool])  # type: ignore[list-item]
    message = first.choices[0].message
    assert message.content == "I look."
    (call,) = message.tool_calls or ()
    assert (call.function.name, call.function.arguments) == ("weather", '{"city": "Ulm"}')
    answer = {"role": "tool", "tool_call_id": call.id, "content": "clear sky"}
    second = await client.chat.completions.create(
        model="any",
        messages=[asked, message.model_dump(), answer],  # type: ignore[list-item]
        tools=[tool],  # type: ignore[list-item]
    )
    assert second.choices[0].message.content == "Sunny."
    export = await empty_world.export(rewards={"": 1.0})
    assert export.metrics["num_forks"] == 0
    assert len(export.rows) == 2


async def test_a_gateway_with_a_wrong_parser_does_not_start(empty_world: GatewayWorld) -> None:
    empty_world.run_settings["chat"] = {"tool_parser": "no_module_of_a_user:Parser"}
    with pytest.raises(ConfigError, match=r"chat\.tool_parser: cannot import 'no_module_of_a_user'"):
        await empty_world.start_gateway()
