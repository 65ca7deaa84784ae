"""Tool calls as models write them: valid, several at once, malformed."""

from __future__ import annotations

import json
import random
from typing import Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tailrace.chat.tool_parsers import TOOL_PARSERS, ParsedCalls
from tailrace.sdk import tool
from tailrace_protos.chat import ToolSchema

TOOLS = (
    ToolSchema(
        "search",
        "",
        {
            "type": "object",
            "properties": {
                "query": {"type": "string"},
                "limit": {"type": "integer"},
                "ratio": {"type": "number"},
                "fresh": {"type": "boolean"},
                "tags": {"type": "array"},
                "filter": {"anyOf": [{"type": "object"}, {"type": "null"}]},
                "zip": {"type": ["string", "null"]},
            },
        },
    ),
)
DS = "<｜tool▁call▁begin｜>{}<｜tool▁call▁end｜>"
DS_ALL = "<｜tool▁calls▁begin｜>{}<｜tool▁calls▁end｜>"
HARMONY = "<|start|>assistant to=functions.{}<|channel|>commentary json<|message|>{}<|call|>"
ONE = [("search", {"query": "a"})]
TWO = [("search", {"query": "a"}), ("now", {})]
WELL_FORMED = [
    ("hermes", '<tool_call>\n{"name": "search", "arguments": {"query": "a"}}\n</tool_call>', "", ONE),
    (
        "hermes",
        'I look.\n<tool_call>{"name":"search","arguments":{"query":"a"}}</tool_call>'
        '<tool_call>{"name": "now"}</tool_call>',
        "I look.",
        TWO,
    ),
    ("hermes", '<tool_call>{"name": "search", "parameters": {"query": "a"}}', "", ONE),
    ("hermes", '<tool_call>{"name": "search", "arguments": "{\\"query\\": \\"a\\"}"}', "", ONE),
    (
        "hermes",
        '<tool_call>{"name": "search", "arguments": {"query": "a"}}\n{"name": "now"}</tool_call>',
        "",
        TWO,
    ),
    (
        "qwen3_coder",
        "Well.\n<tool_call>\n<function=search>\n<parameter=query>\na\n</parameter>\n</function>\n</tool_call>\n"
        "<tool_call>\n<function=now>\n</function>\n</tool_call>",
        "Well.",
        TWO,
    ),
    ("qwen3_coder", "<function=search><parameter=query>a</parameter></function>", "", ONE),
    ("qwen3_coder", "<tool_call><function=search>\n<parameter=query>\na", "", ONE),
    (
        "qwen3_coder",
        "<function=search><parameter=query>\n\n two\n\n</parameter><parameter=limit>3</parameter>"
        "<parameter=ratio>0.5</parameter><parameter=fresh>True</parameter>"
        '<parameter=tags>["x"]</parameter><parameter=filter>null</parameter>'
        "<parameter=zip>0123</parameter><parameter=other>7</parameter></function>",
        "",
        [
            (
                "search",
                {
                    "query": "\n two\n",
                    "limit": 3,
                    "ratio": 0.5,
                    "fresh": True,
                    "tags": ["x"],
                    "filter": None,
                    "zip": "0123",
                    "other": "7",
                },
            )
        ],
    ),
    (
        "qwen3_coder",
        "<function=search><parameter=limit>many</parameter></function>",
        "",
        [("search", {"limit": "many"})],
    ),
    (
        "glm45",
        "Well.\n<tool_call>search\n<arg_key>query</arg_key>\n<arg_value>a</arg_value>\n</tool_call>\n"
        "<tool_call>now\n</tool_call>",
        "Well.",
        TWO,
    ),
    ("glm45", "<tool_call>search<arg_key>query</arg_key><arg_value>a", "", ONE),
    (
        "glm45",
        "<tool_call>search<arg_key>query</arg_key><arg_value> two\n</arg_value>"
        "<arg_key>limit</arg_key><arg_value>3</arg_value>"
        '<arg_key>tags</arg_key><arg_value>["x"]</arg_value>'
        "<arg_key>zip</arg_key><arg_value>0123</arg_value></tool_call>",
        "",
        [("search", {"query": " two\n", "limit": 3, "tags": ["x"], "zip": "0123"})],
    ),
    ("llama3_json", '{"name": "search", "parameters": {"query": "a"}}', "", ONE),
    ("llama3_json", '{"parameters": {"query": "a"}, "name": "search"}', "", ONE),
    ("llama3_json", '<|python_tag|>{"name": "search", "arguments": {"query": "a"}}', "", ONE),
    (
        "llama3_json",
        '{"name": "search", "parameters": {"query": "a"}}; {"name": "now", "parameters": {}}',
        "",
        TWO,
    ),
    (
        "llama3_json",
        '{"type": "function", "function": {"name": "search"}, "parameters": {"query": "a"}}',
        "",
        ONE,
    ),
    ("mistral", '[TOOL_CALLS][{"name": "search", "arguments": {"query": "a"}}]', "", ONE),
    (
        "mistral",
        'So.[TOOL_CALLS] [{"name": "search", "arguments": {"query": "a"}}, {"name": "now"}]',
        "So.",
        TWO,
    ),
    ("mistral", '[TOOL_CALLS]search[ARGS]{"query": "a"}[TOOL_CALLS]now[ARGS]{}', "", TWO),
    ("mistral", '[TOOL_CALLS]search{"query": "a"}', "", ONE),
    (
        "mistral",
        '[TOOL_CALLS][{"name": "search", "arguments": {"query": "[ARGS]"}}]',
        "",
        [("search", {"query": "[ARGS]"})],
    ),
    ("mistral", '[TOOL_CALLS]search{"query": "[ARGS]"}', "", [("search", {"query": "[ARGS]"})]),
    (
        "deepseek",
        "Let me.\n\n"
        + DS_ALL.format(
            DS.format('function<｜tool▁sep｜>search\n```json\n{"query": "a"}\n```')
            + "\n"
            + DS.format("function<｜tool▁sep｜>now\n```json\n{}\n```")
        ),
        "Let me.",
        TWO,
    ),
    ("deepseek", DS_ALL.format(DS.format('search<｜tool▁sep｜>{"query": "a"}')), "", ONE),
    ("gpt_oss", HARMONY.format("search", '{"query": "a"}'), "", ONE),
    (
        "gpt_oss",
        "Wait." + HARMONY.format("search", '{"query": "a"}') + HARMONY.format("now", ""),
        "Wait.",
        TWO,
    ),
    (
        "gpt_oss",
        "<|start|>assistant<|channel|>commentary to=functions.search <|constrain|>json<|message|>"
        '{"query": "a"}',
        "",
        ONE,
    ),
    ("pythonic", '[search(query="a")]', "", ONE),
    ("pythonic", " [search(query='a'), now()]\n", "", TWO),
    ("pythonic", '<|python_start|>[search("a")]<|python_end|>', "", ONE),
    (
        "pythonic",
        '[search(query="x", limit=-3, fresh=true, tags=("u", None), filter={"k": 1.5})]',
        "",
        [
            (
                "search",
                {"query": "x", "limit": -3, "fresh": True, "tags": ["u", None], "filter": {"k": 1.5}},
            )
        ],
    ),
    ("none", '<tool_call>{"name": "now"}</tool_call>', '<tool_call>{"name": "now"}</tool_call>', []),
]


@pytest.mark.parametrize(("parser", "text", "content", "calls"), WELL_FORMED)
def test_well_formed_calls_are_found_and_the_rest_is_content(
    parser: str, text: str, content: str, calls: list[tuple[str, dict[str, object]]]
) -> None:
    found = TOOL_PARSERS[parser].parse(text, TOOLS)
    assert [(call.name, json.loads(call.arguments)) for call in found.calls] == calls
    assert found.content == content
    assert found.malformed == ()


MALFORMED = [
    ("hermes", '<tool_call>{"name": "search", "arguments": {"query": </tool_call>', "invalid JSON"),
    ("hermes", "<tool_call></tool_call>", "it is empty"),
    ("hermes", '<tool_call>{"name": "search", "arguments": [1]}</tool_call>', "must be a JSON object"),
    ("hermes", '<tool_call>{"name": 5}</tool_call>', "no name of a tool"),
    ("hermes", '<tool_call>"search"</tool_call>', "not an object"),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"x": NaN}}</tool_call>', "NaN is not JSON"),
    (
        "hermes",
        '<tool_call>{"name": "f", "arguments": {"x": "\\ud800"}}</tool_call>',
        "written as JSON",
    ),
    ("hermes", '<tool_call>{"name": "\\ud800"}</tool_call>', "no name of a tool"),
    ("hermes", "<tool_call>" + "[" * 100_000, "invalid JSON"),
    ("qwen3_coder", "<tool_call>search</tool_call>", "names no function"),
    (
        "qwen3_coder",
        "<function=search><parameter=query>a</parameter><parameter=query>b</parameter></function>",
        "given twice",
    ),
    ("glm45", '<tool_call>{"name": "search"}</tool_call>', "no name of a tool"),
    ("glm45", "<tool_call>search<arg_key>query</arg_key></tool_call>", "'query' has no value"),
    (
        "glm45",
        "<tool_call>search<arg_key>query</arg_key><arg_value>a</arg_value>"
        "<arg_key>query</arg_key><arg_value>b</arg_value></tool_call>",
        "given twice",
    ),
    ("qwen3_coder", "<function=search>a</function>", "no parameters"),
    (
        "qwen3_coder",
        "<function=search><parameter=query\na</parameter><parameter=limit>3</parameter></function>",
        "the tag of the parameter 'query' is not closed",
    ),
    ("llama3_json", '{"name": "search", "parameters": {"query": "a"', "invalid JSON"),
    ("llama3_json", "<|python_tag|>print(1)", "invalid JSON"),
    ("mistral", "[TOOL_CALLS]", "it is empty"),
    ("mistral", "[TOOL_CALLS][]", "it is empty"),
    ("mistral", '[TOOL_CALLS]search[ARGS]{"query": ', "invalid JSON"),
    ("deepseek", DS.format("search"), "lacks"),
    ("deepseek", "<｜tool▁calls▁begin｜>search", "lacks"),
    ("gpt_oss", HARMONY.format("search", "{query}"), "invalid JSON"),
    ("gpt_oss", "<|start|>assistant<|message|>{}", "no recipient"),
    ("pythonic", '[search(query="a)]', "invalid syntax"),
    ("pythonic", "[search(query=open('x'))]", "must be literals"),
    ("pythonic", "[search(1, 2, 3, 4, 5, 6, 7, 8)]", "must be named"),
    ("pythonic", "[search(x=1e999)]", "written as JSON"),
    ("pythonic", "[search(x=1, x=2)]", "gives x twice"),
    ("pythonic", "[search('a', query='b')]", "gives query twice"),
    ("pythonic", "[now(), 3]", "not every item"),
    ("pythonic", "[f(" + "-" * 50_000 + "1)]", "tool call"),
]


@pytest.mark.parametrize(("parser", "text", "reason"), MALFORMED)
def test_a_malformed_call_is_explained_and_stays_in_the_content(
    parser: str, text: str, reason: str
) -> None:
    found = TOOL_PARSERS[parser].parse(text, TOOLS)
    assert found.calls == ()
    (explained,) = found.malformed
    assert reason in explained
    assert len(explained) < 1000
    if parser != "deepseek":
        assert found.content == text


def test_a_good_call_beside_a_malformed_one_is_still_made() -> None:
    text = '<tool_call>{"name": "now"}</tool_call> and <tool_call>{"name": </tool_call>'
    found = TOOL_PARSERS["hermes"].parse(text, TOOLS)
    assert [call.name for call in found.calls] == ["now"]
    assert found.content == ' and <tool_call>{"name": </tool_call>'
    assert len(found.malformed) == 1


@pytest.mark.parametrize(
    ("parser", "text"),
    [
        ("llama3_json", '{"answer": 42}'),
        ("llama3_json", "{x} is a set"),
        ("llama3_json", '{"name": "parameters", "value": "arguments"}'),
        ("pythonic", "[1, 2, 3] is a list"),
        ("pythonic", "[link](https://example.org)"),
        ("hermes", "2 < 3 <tool"),
    ],
)
def test_answers_that_only_begin_like_calls_are_content(parser: str, text: str) -> None:
    assert TOOL_PARSERS[parser].parse(text, TOOLS) == ParsedCalls(text)


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        ({"enum": [1, 2]}, "2", 2),
        ({"enum": ["1", "2"]}, "2", "2"),
        ({"enum": ["auto", 5]}, "5", 5),
        ({"enum": ["auto", 5]}, "auto", "auto"),
        ({"enum": [0.5, 1]}, "1", 1),
        ({"enum": [1, 2, None]}, "null", None),
        ({"const": True}, "true", True),
        ({"anyOf": [{"enum": [1, 2]}, {"type": "null"}]}, "1", 1),
        ({"$ref": "#/$defs/Filter"}, '{"a": 1}', {"a": 1}),
        ({"allOf": [{"$ref": "#/$defs/Level"}], "default": 1}, "2", 2),
        ({"anyOf": [{"$ref": "#/$defs/Filter"}, {"type": "null"}]}, "null", None),
        ({"$ref": "#/$defs/Loop"}, "1", "1"),
        ({"$ref": "#/$defs/Nothing"}, "1", "1"),
        ({"$ref": "other.json"}, "1", "1"),
        ({"enum": "1"}, "1", "1"),
        ({}, "1", "1"),
    ],
)
def test_values_of_qwen3_coder_have_the_types_that_a_schema_allows(
    schema: dict[str, object], text: str, value: object
) -> None:
    definitions = {
        "Filter": {"type": "object"},
        "Level": {"enum": [1, 2]},
        "Loop": {"anyOf": [{"$ref": "#/$defs/Loop"}]},
    }
    parameters = {"type": "object", "properties": {"x": schema}, "$defs": definitions}
    tools = [ToolSchema("f", "", parameters)]
    written = f"<function=f><parameter=x>{text}</parameter></function>"
    (call,) = TOOL_PARSERS["qwen3_coder"].parse(written, tools).calls
    assert json.loads(call.arguments) == {"x": value}


def test_a_literal_number_of_a_python_tool_can_be_given_in_every_format() -> None:
    @tool
    def pick(level: Literal[1, 2]) -> int:
        """Pick a level."""
        return level

    written = "<function=pick><parameter=level>2</parameter></function>"
    (call,) = TOOL_PARSERS["qwen3_coder"].parse(written, [pick.spec.schema]).calls
    assert pick.bind(json.loads(call.arguments)) == {"level": 2}


def test_ids_that_models_write_are_kept() -> None:
    text = '[TOOL_CALLS][{"name": "now", "arguments": {}, "id": "abc123def"}]'
    assert TOOL_PARSERS["mistral"].parse(text, ()).calls[0].call_id == "abc123def"
    text = "[TOOL_CALLS]now[CALL_ID]abc123def[ARGS]{}"
    assert TOOL_PARSERS["mistral"].parse(text, ()).calls[0].call_id == "abc123def"


def test_an_id_that_no_message_can_carry_is_not_kept() -> None:
    text = '[TOOL_CALLS][{"name": "now", "arguments": {}, "id": "a\\ud800"}]'
    (call,) = TOOL_PARSERS["mistral"].parse(text, ()).calls
    assert call == ("now", "{}", "")


def test_arguments_are_written_in_one_way_whatever_white_space_the_model_used() -> None:
    text = '<tool_call>{"name": "f",\n\n "arguments":{"b":1 ,"a" : "ü"}}</tool_call>'
    (call,) = TOOL_PARSERS["hermes"].parse(text, ()).calls
    assert call.arguments == '{"b": 1, "a": "ü"}'


PIECES = [text for _, text, _, _ in WELL_FORMED] + [text[:200] for _, text, _ in MALFORMED]
FRAGMENTS = [
    "<tool_call>", "</tool_call>", "<function=", "<parameter=", "</function>", "[TOOL_CALLS]", "[ARGS]",
    "<|start|>", "<|message|>", " to=functions.", "<|python_tag|>", "<｜tool▁call▁begin｜>", "{", "}",
    '"', "[", "]", "(", ")", "\n", "\\", "\0", "search", "=", ",", "name", "\ud800", "é", "'", "lambda",
    "1e999", "\\ud800", "\\u0000",
]  # fmt: skip
fuzz = st.one_of(
    st.text(max_size=60),
    st.lists(st.sampled_from(FRAGMENTS), max_size=12).map("".join),
    st.tuples(st.sampled_from(PIECES), st.randoms(use_true_random=False)).map(lambda it: mutated(*it)),
)


def mutated(text: str, chance: random.Random) -> str:
    """The text with some pieces cut, doubled or replaced."""
    for _ in range(chance.randint(1, 4)):
        at, size = chance.randint(0, len(text)), chance.randint(0, 8)
        text = (
            text[:at]
            + chance.choice(["", chance.choice(FRAGMENTS), text[at : at + 20]])
            + text[at + size :]
        )
    return text


@pytest.mark.parametrize("name", sorted(TOOL_PARSERS))
@given(text=fuzz)
@settings(max_examples=150, deadline=None)
def test_no_text_makes_a_parser_raise_or_write_arguments_that_are_no_object(
    name: str, text: str
) -> None:
    found = TOOL_PARSERS[name].parse(text, TOOLS)
    for call in found.calls:
        assert isinstance(json.loads(call.arguments), dict)
        assert call.name
        "".join(call).encode()  # as every message is
    if not found.calls and not found.malformed:
        assert found.content.strip() in text
