"""Growing hostile text and schemas: parsers and templates take time linear in them, whoever wrote them.

Texts have 60,000 characters, some 600,000. Reading the rest again at every mark or character takes
minutes for them, a linear way some milliseconds. The limit of processor time only ends tests that would
hang.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tailrace.chat.reasoning import REASONING_PARSERS
from tailrace.chat.text_stream import StopText, TokenText
from tailrace.chat.tool_parsers import TOOL_PARSERS
from tailrace.cpu_limit import cpu_limit
from tailrace_protos.chat import ChatMessage, ToolSchema
from tests.unit.tailrace.chat.families import FAMILIES, QWEN, Family, renderer, tokenizer

NUM_CHARS, MANY_CHARS = 60_000, 600_000
HANG_S = 20.0
TOOLS = (ToolSchema("f", "", {"type": "object", "properties": {"x": {"type": ["integer", "object"]}}}),)
MARKS = {
    "deepseek": ("<｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n", "\n```", "```"),
    "gpt_oss": (
        "<|start|>assistant to=",
        "to=functions.",
        "<|channel|>",
        "<|message|>",
        "<|call|>",
        "<",
    ),
    "glm45": (
        "<tool_call>",
        "<tool_call>f",
        "</tool_call>",
        "<arg_key>x",
        "</arg_key>",
        "<arg_value>1",
        "</arg_value>",
    ),
    "hermes": ("<tool_call>", "</tool_call>", '{"name": "f", "arguments": {"x": 1}}'),
    "llama3_json": ('{"name":', '"name" ', '"parameters"', '"arguments"', "<|python_tag|>"),
    "mistral": ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "[TOOL_CALLS]f{", '{"name": "f"}'),
    "none": ("<tool_call>",),
    "pythonic": ("[", "[f(", "f(x=1), ", "<|python_start|>", "f.", "-", "x=", "'"),
    "qwen3_coder": (
        "<tool_call>",
        "</tool_call>",
        "<function=",
        "<function=f>",
        "</function>",
        "<parameter=",
        "<parameter=x>1",
        "</parameter>",
    ),
}
THOUGHTS = {
    "harmony": ("<|start|>", "<|channel|>analysis", "<|message|>", "<|end|>", "to=", "<|call|>"),
    "think": ("<think>", "</think>", "<thin", "</thin"),
    "none": ("a",),
}
ORDINARY = ("a", "1", " ", "\n", '"', "\\", "{", "[", "{[", "(", ",", "<", '{"a":', "}", "\n ", "é")


def hostile(marks: tuple[str, ...]) -> Iterator[str]:
    """Repeated pieces, alone, in pairs and behind one mark."""
    for mark in marks:
        yield mark * (MANY_CHARS // len(mark))
    for piece in (*marks, *ORDINARY):
        for begin in ("", *marks):
            yield begin + piece * (NUM_CHARS // len(piece))
    for first in marks:
        for second in marks:
            yield (first + second) * (NUM_CHARS // len(first + second))


@pytest.mark.parametrize("name", sorted(TOOL_PARSERS))
def test_tool_parsers_read_hostile_text(name: str) -> None:
    """Calls and content are found, and nothing is raised."""
    parser = TOOL_PARSERS[name]
    for text in hostile(MARKS[name]):
        with cpu_limit(HANG_S):
            parsed = parser.parse(text, TOOLS)
            parser.certain(text, 0)
        assert parsed.calls or parsed.malformed or parsed.content == text


def many_paths(depth: int) -> dict[str, Any]:
    """Schema of an integer that 2^depth ways through its definitions lead to."""
    twice = {f"a{i}": {"anyOf": [{"$ref": f"#/$defs/a{i + 1}"}] * 2} for i in range(depth)}
    ends = {f"a{depth}": {"type": "integer"}}
    return {"properties": {"x": {"$ref": "#/$defs/a0"}}, "$defs": {**twice, **ends}}


def deep(depth: int) -> dict[str, Any]:
    """Schema that holds an integer in so many others."""
    inner: dict[str, Any] = {"type": "integer"}
    for _ in range(depth):
        inner = {"anyOf": [inner]}
    return {"properties": {"x": inner}}


@pytest.mark.parametrize("parameters", [many_paths(60), deep(5000)], ids=["many paths", "deep"])
@pytest.mark.parametrize(
    ("name", "form"),
    [
        ("glm45", "<tool_call>f<arg_key>x</arg_key><arg_value>{}</arg_value></tool_call>"),
        ("qwen3_coder", "<function=f><parameter=x>{}</parameter></function>"),
    ],
)
def test_values_are_read_with_hostile_schemas(name: str, form: str, parameters: dict[str, Any]) -> None:
    """A value has the schema's type, whatever the way to it; another text stays a text."""
    tools = (ToolSchema("f", "", parameters),)
    for text, value in (("7", 7), ("y", "y")):
        with cpu_limit(HANG_S):
            (call,) = TOOL_PARSERS[name].parse(form.format(text), tools).calls
        assert json.loads(call.arguments) == {"x": value}


@pytest.mark.parametrize("size", [MANY_CHARS, 512])
@pytest.mark.parametrize("name", sorted(REASONING_PARSERS))
def test_reasoning_parsers_read_hostile_text(name: str, size: int) -> None:
    """A reply that arrives at once or in small pieces is split without loss of letters."""
    for text in hostile(THOUGHTS[name]):
        splitter = REASONING_PARSERS[name].splitter("<think>")
        stop = StopText(["<|end|", "aaaaaaab"])
        found = ""
        with cpu_limit(HANG_S):
            for start in range(0, len(text), size):
                found += "".join(splitter.feed(stop.feed(text[start : start + size])))
            found += "".join(splitter.feed(stop.finish()))
            found += "".join(splitter.finish())
        assert len(found) <= len(text) * 2


@pytest.mark.parametrize("begin", ["", "a", "<think>a", "<think>a</thin"])
@pytest.mark.parametrize("name", sorted(REASONING_PARSERS))
def test_white_space_that_arrives_character_by_character_is_read_once(name: str, begin: str) -> None:
    """It is kept while a mark may follow, and given when none does."""
    splitter = REASONING_PARSERS[name].splitter("")
    with cpu_limit(HANG_S):
        found = "".join(splitter.feed(begin))
        for _ in range(MANY_CHARS // 2):
            found += "".join(splitter.feed("\n"))
        found += "".join(splitter.feed("b")) + "".join(splitter.finish())
    whole = begin + "\n" * (MANY_CHARS // 2) + "b"
    assert found == (whole.removeprefix("<think>") if name == "think" else whole)


@pytest.mark.parametrize("family", FAMILIES, ids=str)
def test_templates_render_hostile_text(family: Family) -> None:
    """Messages of any text are rendered, appended and read again."""
    reader = renderer(family)
    user = ChatMessage("user", "go")
    for piece in (*family.special, *ORDINARY, *family.added):
        text = piece * (NUM_CHARS // len(piece))
        with cpu_limit(HANG_S):
            reader.opening_ids((ChatMessage("user", text),), TOOLS)
            asked = reader.continuation_ids(
                (user, ChatMessage("assistant", text)), (ChatMessage("user", text),), TOOLS, closed=True
            )
            parsed = reader.parse_reply(asked, TOOLS)
        assert len(asked)
        assert parsed.message.role == "assistant"


@pytest.mark.parametrize("size", [1, 7, 100])
def test_a_stream_of_bytes_that_are_no_text_is_not_decoded_again_and_again(size: int) -> None:
    """The pieces are the text of all ids, whole characters behind invalid bytes included."""
    ids = [*tokenizer(QWEN).encode("go é日本").ids, *[_byte(0x9F)] * 4_000]
    ids += tokenizer(QWEN).encode("日本 é").ids
    stream = TokenText(tokenizer(QWEN), frozenset(), frozenset())
    found = ""
    with cpu_limit(HANG_S):
        for start in range(0, len(ids), size):
            found += stream.feed(ids[start : start + size])
    assert found + stream.finish() == tokenizer(QWEN).decode(ids, skip_special_tokens=False)


@pytest.mark.parametrize("size", [1, 10, 63, 200])
def test_characters_of_many_ids_are_whole_in_long_streams(size: int) -> None:
    """Wherever the ids are cut, no character is lost."""
    text = "日本語é" * 300
    ids = tokenizer(QWEN).encode(text).ids
    stream = TokenText(tokenizer(QWEN), frozenset(), frozenset())
    pieces = [stream.feed(ids[start : start + size]) for start in range(0, len(ids), size)]
    assert "".join([*pieces, stream.finish()]) == text


def _byte(value: int) -> int:
    """Id of one byte: byte-level tokenizers write 0x80 to 0xA0 as the letters from U+0122."""
    token_id = tokenizer(QWEN).token_to_id(chr(0x122 + value - 0x80))
    assert token_id is not None
    assert tokenizer(QWEN).decode([token_id]) == "\ufffd"
    return token_id
