"""`hermes`: JSON objects in `<tool_call>` tags (Nous Hermes, Qwen 2.5 and 3)."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from functools import partial

from tailrace.chat.text_stream import first_possible
from tailrace.chat.tool_parsers.arguments import NoCallError, call_of, parse_json
from tailrace.chat.tool_parsers.blocks import CallCollector, split_blocks
from tailrace.chat.tool_parsers.protocol import FoundCall, ParsedCalls
from tailrace_protos.chat import ToolSchema

_BEGIN, _END = "<tool_call>", "</tool_call>"


class HermesParser:
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, one or more."""

    special_texts: tuple[str, ...] = (_BEGIN, _END)

    def certain(self, text: str, start: int) -> int:
        """Content ends where the first tag begins."""
        return first_possible(text, (_BEGIN,), start)

    def parse(self, text: str, tools: Sequence[ToolSchema]) -> ParsedCalls:
        """Take the calls out; a last block may lack its end."""
        found = CallCollector()
        for before, block in split_blocks(text, _BEGIN, _END):
            found.text(before)
            if block is not None:
                raw, inside = block
                found.block(raw, partial(_calls, inside))
        return found.parsed()


def _calls(text: str) -> Iterable[FoundCall]:
    """The objects of one block: usually one, sometimes one a line."""
    return [call_of(value) for value in json_values(text)]


def json_values(text: str, separators: str = "") -> list[object]:
    """All JSON values that follow one another in `text`; at least one."""
    decoder = json.JSONDecoder(strict=False)
    values: list[object] = []
    rest = text.strip()
    while rest or not values:
        try:
            _, end = decoder.raw_decode(rest)
        except (RecursionError, ValueError):
            end = len(rest)
        if not rest:
            raise NoCallError("it is empty")
        values.append(parse_json(rest[:end]))
        rest = rest[end:].lstrip().lstrip(separators).lstrip()
    return values
