"""`deepseek`: calls between special tokens (DeepSeek V3 with fenced JSON, V3.1 with bare JSON)."""

import re
from collections.abc import Sequence
from functools import partial

from tailrace.chat.tool_parsers.calls import CallCollector, NoCallError, make_call
from tailrace.chat.tool_parsers.protocol import FoundCall, ParsedCalls, ToolParser
from tailrace_protos.chat import ToolSchema

_ALL_BEGIN, _ALL_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_BEGIN, _SEPARATOR, _END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
_FENCE = "```"


class DeepSeekParser(ToolParser):
    """Begin, name, separator, arguments, end for each call; another pair of tokens around all calls."""

    special_texts = (_ALL_BEGIN, _BEGIN, _SEPARATOR, _END, _ALL_END)
    begins = (_ALL_BEGIN, _BEGIN, _ALL_END)  # a stray end is no content either
    template_call = re.compile(_BEGIN)

    def parse(self, text: str, tools: Sequence[ToolSchema]) -> ParsedCalls:
        """See `ToolParser`."""
        found = CallCollector()
        found.blocks(text, _BEGIN, _END, _calls, _without_marks)
        if _BEGIN not in text and _ALL_BEGIN in text:
            found.block("", partial(_calls, ""))
        return found.parsed()


def _without_marks(text: str) -> str:
    return text.replace(_ALL_BEGIN, "").replace(_ALL_END, "")


def _calls(inside: str) -> list[FoundCall]:
    name, found, arguments = inside.partition(_SEPARATOR)
    if not found:
        raise NoCallError(f"it lacks {_SEPARATOR}")
    if name.strip() == "function":  # V3 writes the kind of tool first
        head, fence, body = arguments.lstrip().partition(f"\n{_FENCE}")
        if fence and "\n" not in head:
            name, arguments = head, _unfenced(body)
    return [make_call(name.strip(), arguments)]


def _unfenced(body: str) -> str:
    """Text behind the begin of a fence, without its language and its end; both may be missing."""
    return body.removeprefix("json").rstrip().removesuffix(_FENCE)
