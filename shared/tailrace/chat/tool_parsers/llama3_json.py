"""`llama3_json`: the whole reply is one call, or several separated by `;` (Llama 3.1 to 3.3)."""

import re
from collections.abc import Sequence

from tailrace.chat.text_stream import first_possible
from tailrace.chat.tool_parsers.calls import CallCollector, calls_of, json_values
from tailrace.chat.tool_parsers.protocol import CallForm, ParsedCalls, ToolParser
from tailrace_protos.chat import ToolSchema

_TAG = "<|python_tag|>"
_NAME_KEY = re.compile(r'"name"\s*:')
_ARGUMENT_KEYS = re.compile(r'"(?:parameters|arguments)"\s*:')


class Llama3JsonParser(ToolParser):
    """Format `{"name": ..., "parameters": {...}}`, optionally after `<|python_tag|>`.

    A reply that is JSON but no call is content.
    """

    special_texts = (_TAG,)
    template_call = re.compile(r'"name":\s*"probe".*"parameters":', re.DOTALL)
    call_form = CallForm(separator="; ", arguments_key="parameters")

    def certain(self, text: str, start: int) -> int:
        """Nothing while the reply may be JSON, else all text before the tag."""
        begun = text.lstrip()
        return start if not begun or begun.startswith("{") else first_possible(text, (_TAG,), start)

    def parse(self, text: str, tools: Sequence[ToolSchema]) -> ParsedCalls:
        """See `ToolParser`."""
        found = CallCollector()
        before, tag, calls = text.partition(_TAG)
        if not tag:
            if not _looks_like_call(text):
                return ParsedCalls(text)
            before, calls = "", text
        found.text(before)
        found.block(tag + calls, lambda: calls_of(json_values(calls, separators=";,")))
        return found.parsed()


def _looks_like_call(text: str) -> bool:
    keys = (_NAME_KEY, _ARGUMENT_KEYS) if text.lstrip().startswith("{") else ()
    return bool(keys) and all(key.search(text) for key in keys)
