"""Parsers of replies from a user's folder, by `module:Class`."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tailrace.chat import ChatArgs, Renderer, check_parser_names, load_parsers
from tailrace.chat.reasoning import REASONING_PARSERS
from tailrace.chat.tool_parsers import TOOL_PARSERS
from tailrace.config import ConfigError
from tailrace.config.keys import keys_of
from tests.unit.tailrace.chat import families
from tests.unit.tailrace.chat.families import LLAMA3, TOOLS

ROOT = Path(__file__).parents[4]
PAGE = (ROOT / "docs" / "tools.md").read_text().partition("## Your own tool parser\n")[2]
EXAMPLE = re.search(r"```python\n(.*?)```", PAGE, re.DOTALL)

REASONING = """
from tailrace.chat import ReasoningParser, Split

class Splitter:
    def __init__(self):
        self.text = ""
    def feed(self, text):
        self.text += text
        return Split()
    def finish(self):
        thought, mark, answer = self.text.partition(" => ")
        return Split(thought, answer) if mark else Split(content=self.text)

class ArrowParser(ReasoningParser):
    def splitter(self, prompt):
        return Splitter()
"""

Module = Callable[[str], str]


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Module:
    """Writes a module into a folder of the user; returns its name."""
    monkeypatch.syspath_prepend(tmp_path)
    name = "parsers_of_" + re.sub(r"\W", "_", request.node.name)

    def write(source: str) -> str:
        (tmp_path / f"{name}.py").write_text(source)
        return name

    return write


def own(**chat: str) -> Renderer:
    return Renderer.from_model_card(families.card(LLAMA3), ChatArgs(**chat))


def read(renderer: Renderer, text: str) -> tuple[str, list[tuple[str, str]], str]:
    parsed = renderer.parse_reply(renderer.encode(text), TOOLS)
    calls = [(call.name, call.arguments) for call in parsed.message.tool_calls]
    return parsed.message.content, calls, parsed.malformed


def test_the_parser_of_the_page_reads_calls(module: Module) -> None:
    assert EXAMPLE is not None
    renderer = own(tool_parser=f"{module(EXAMPLE.group(1))}:AngleParser")
    text = 'Look. <<search {"query": "boats"}>> <<now {}>>'
    assert read(renderer, text) == ("Look.", [("search", '{"query": "boats"}'), ("now", "{}")], "")
    assert read(renderer, "a < b")[0] == "a < b"
    content, calls, malformed = read(renderer, "<<search boats>>")
    assert (content, calls) == ("<<search boats>>", [])
    assert "invalid JSON" in malformed


def test_text_before_the_marker_of_an_own_parser_is_streamed(module: Module) -> None:
    assert EXAMPLE is not None
    renderer = own(tool_parser=f"{module(EXAMPLE.group(1))}:AngleParser")
    stream = renderer.reply_stream(TOOLS)
    assert stream.feed(renderer.encode("Look now <<no")).content == "Look now"


def test_an_own_reasoning_parser_splits_replies(module: Module) -> None:
    renderer = own(reasoning_parser=f"{module(REASONING)}:ArrowParser", tool_parser="none")
    message = renderer.parse_reply(renderer.encode("hm => yes")).message
    assert (message.reasoning, message.content) == ("hm", "yes")


TOOL = "from tailrace.chat import FoundCall, ParsedCalls, ToolParser\n\n\nclass Own(ToolParser):\n"
SPLIT = "from tailrace.chat import ReasoningParser, Split\n\n\nclass Own(ReasoningParser):\n"


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        ("class Own:\n    pass\n", r"derive a class and define parse\(self, text, tools\)"),
        ("Own = print\n", "is not a subclass of"),
        (TOOL + "    pass\n", "abstract method parse"),
        (TOOL + "    def parse(self, text):\n        return ParsedCalls(text)\n", "takes 2 positional"),
        (TOOL + "    def parse(self, text, tools):\n        return text\n", "found int and str"),
        (TOOL + "    def parse(self, text, tools):\n        return 1 / 0\n", "ZeroDivisionError"),
        (
            TOOL + "    special_texts = '<<'\n    def parse(self, text, tools):\n        return 0\n",
            "special_texts must be a tuple of texts",
        ),
        (
            TOOL
            + "    reasoning_parser = 'hum'\n    def parse(self, text, tools):\n        return 0\n",
            "name one of harmony, think, none",
        ),
        ("def Other():\n    pass\n", "has no 'Own'"),
        ("import nowhere_at_all\n", "nowhere_at_all"),
    ],
)
def test_a_wrong_tool_parser_is_refused_at_start(module: Module, source: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem) as refused:
        load_parsers(ChatArgs(tool_parser=f"{module(source)}:Own"))
    assert str(refused.value).startswith("chat.tool_parser: ")


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        ("class Own:\n    pass\n", r"derive a class and define splitter\(self, prompt\)"),
        (SPLIT + "    def splitter(self, prompt):\n        return None\n", "AttributeError"),
        (
            SPLIT + "    def splitter(self, prompt):\n        return self\n"
            "    def feed(self, text):\n        return text\n"
            "    def finish(self):\n        return ''\n",
            "must return a tailrace.chat.Split",
        ),
    ],
)
def test_a_wrong_reasoning_parser_is_refused_at_start(
    module: Module, source: str, problem: str
) -> None:
    with pytest.raises(ConfigError, match=problem) as refused:
        load_parsers(ChatArgs(reasoning_parser=f"{module(source)}:Own"))
    assert str(refused.value).startswith("chat.reasoning_parser: ")


def test_an_own_tool_parser_that_raises_leaves_the_reply_as_content(module: Module) -> None:
    source = TOOL + (
        "    def certain(self, text, start):\n"
        "        return len(text) if '!' not in text else text.absent\n"
        "    def parse(self, text, tools):\n"
        "        return ParsedCalls(text) if '!' not in text else text.absent\n"
    )
    renderer = own(tool_parser=f"{module(source)}:Own")
    assert read(renderer, "fine") == ("fine", [], "")
    content, calls, malformed = read(renderer, "boom!")
    assert (content, calls) == ("boom!", [])
    assert "Own.parse raised AttributeError" in malformed


@pytest.mark.parametrize("raising", ["splitter", "feed", "finish"])
def test_an_own_reasoning_parser_that_raises_passes_text_on(module: Module, raising: str) -> None:
    source = REASONING + (
        "\ntexts = []\n"
        "class Own(ArrowParser):\n"
        "    def splitter(self, prompt):\n"
        "        assert 'splitter' != RAISING or not texts\n"
        "        texts.append(prompt)\n"
        "        made = Splitter()\n"
        "        for name in ('feed', 'finish'):\n"
        "            if name == RAISING and len(texts) > 1:\n"
        "                setattr(made, name, lambda *_: 1 / 0)\n"
        "        return made\n"
        f"RAISING = {raising!r}\n"
    )
    renderer = own(reasoning_parser=f"{module(source)}:Own")
    message = renderer.parse_reply(renderer.encode("a b c")).message
    assert message.content == ("" if raising == "finish" else "a b c")


@pytest.mark.parametrize(
    "returned", ["None", "text", "ParsedCalls(text, (FoundCall('f', {'a': 1}),))", "ParsedCalls(None)"]
)
def test_what_an_own_tool_parser_may_not_return_leaves_the_reply_as_content(
    module: Module, returned: str
) -> None:
    body = (
        "    def parse(self, text, tools):\n"
        f"        return {returned} if '!' in text else ParsedCalls(text)\n"
    )
    renderer = own(tool_parser=f"{module(TOOL + body)}:Own")
    content, calls, malformed = read(renderer, "Look! Now")
    assert (content, calls) == ("Look! Now", [])
    assert "Expected" in malformed


def test_an_own_tool_parser_may_need_a_reasoning_parser(module: Module) -> None:
    source = TOOL + (
        "    reasoning_parser = 'think'\n"
        "    def parse(self, text, tools):\n        return ParsedCalls(text)\n"
    )
    path = f"{module(source)}:Own"
    with pytest.raises(ConfigError, match="needs the reasoning parser think"):
        load_parsers(ChatArgs(tool_parser=path, reasoning_parser="none"))
    renderer = own(tool_parser=path)
    assert renderer.parse_reply(renderer.encode("<think>hm</think>yes")).message.reasoning == "hm"


@pytest.mark.parametrize(
    ("chat", "problem"),
    [
        ({"tool_parser": "hermse"}, "chat.tool_parser: unknown parser 'hermse'; did you mean 'hermes'"),
        ({"tool_parser": "xml"}, "use auto, gpt_oss, .*, none, or module:Class"),
        ({"reasoning_parser": "thinks"}, "chat.reasoning_parser: .* did you mean 'think'"),
    ],
)
def test_unknown_names_are_refused_with_the_closest_valid_one(
    chat: dict[str, str], problem: str
) -> None:
    with pytest.raises(ConfigError, match=problem):
        check_parser_names(ChatArgs(**chat))


def test_the_prose_of_the_keys_and_the_page_name_every_parser() -> None:
    prose = {key.name: key.meaning for key in keys_of(ChatArgs)}
    for key, names in (("tool_parser", TOOL_PARSERS), ("reasoning_parser", REASONING_PARSERS)):
        for text in (prose[key], PAGE):
            assert {name for name in names if f"`{name}`" not in text} == set()
