"""`gpt_oss`: harmony messages to a recipient (gpt-oss). Needs the `harmony` reasoning parser."""

import re
from collections.abc import Sequence
from functools import partial

from tailrace.chat.reasoning.harmony import CHANNEL, CONSTRAIN, ENDS, MESSAGE, START, HarmonyParser
from tailrace.chat.tool_parsers.calls import CallCollector, NoCallError, make_call
from tailrace.chat.tool_parsers.protocol import FoundCall, ParsedCalls, ToolParser
from tailrace_protos.chat import ToolSchema

_TO, _NAMESPACE = "to=", "functions."
_ENDS = re.compile("|".join(map(re.escape, ENDS)))


class GptOssParser(ToolParser):
    """Format `<|start|>assistant to=functions.f<|channel|>commentary json<|message|>{...}<|call|>`."""

    special_texts = HarmonyParser.special_texts
    begins = (START,)  # the reasoning parser leaves it only before messages to a recipient
    template_call = re.compile(r"to=functions\.probe")
    reasoning_parser = "harmony"

    def parse(self, text: str, tools: Sequence[ToolSchema]) -> ParsedCalls:
        """See `ToolParser`."""
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
    if end is None:
        return message, "", ""
    return message[: end.start()], end.group(), message[end.end() :]


def _calls(message: str) -> list[FoundCall]:
    header, found, arguments = message.partition(MESSAGE)
    addressed = header.partition(_TO)[2].partition(CHANNEL)[0].partition(CONSTRAIN)[0]
    words = addressed.split(maxsplit=1)
    if not (found and words):
        raise NoCallError("it has no recipient or no message")
    return [make_call(words[0].removeprefix(_NAMESPACE), arguments)]
