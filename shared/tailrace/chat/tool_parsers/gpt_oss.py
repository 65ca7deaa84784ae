"""`gpt_oss`: harmony messages to a recipient (gpt-oss); the harmony reasoning parser passes them on."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import partial

from tailrace.chat.reasoning.harmony import CHANNEL, CONSTRAIN, ENDS, MESSAGE, START, HarmonyParser
from tailrace.chat.text_stream import first_possible
from tailrace.chat.tool_parsers.arguments import NoCallError, make_call
from tailrace.chat.tool_parsers.blocks import CallCollector
from tailrace.chat.tool_parsers.protocol import FoundCall, ParsedCalls
from tailrace_protos.chat import ToolSchema

_RECIPIENT = re.compile(
    rf"to=(?:functions\.)?([^\s<]+?)(?=\s|{re.escape(CHANNEL)}|{re.escape(CONSTRAIN)}|$)"
)
_ENDS = re.compile("|".join(map(re.escape, ENDS)))


class GptOssParser:
    """`<|start|>assistant to=functions.f<|channel|>commentary json<|message|>{...}<|call|>`."""

    special_texts: tuple[str, ...] = HarmonyParser.special_texts

    def certain(self, text: str, start: int) -> int:
        """Content ends where the first message with a recipient begins."""
        return first_possible(text, (START,), start)

    def parse(self, text: str, tools: Sequence[ToolSchema]) -> ParsedCalls:
        """Take the calls out."""
        found = CallCollector()
        before, *messages = text.split(START)
        found.text(before)
        for message in messages:
            inside, end, behind = _cut(message)
            found.block(START + inside + end, partial(_calls, inside))
            found.text(behind)
        return found.parsed()


def _cut(message: str) -> tuple[str, str, str]:
    end = _ENDS.search(message)
    return (
        (message, "", "")
        if end is None
        else (
            message[: end.start()],
            end.group(),
            message[end.end() :],
        )
    )


def _calls(message: str) -> list[FoundCall]:
    header, found, arguments = message.partition(MESSAGE)
    recipient = _RECIPIENT.search(header)
    if not found or recipient is None:
        raise NoCallError("it has no recipient or no message")
    return [make_call(recipient.group(1), arguments)]
