"""`hermes`: JSON objects in `<tool_call>` tags (Nous Hermes, Qwen 2.5 and 3)."""

import re
from collections.abc import Iterable, Sequence

from tailrace.chat.tool_parsers.calls import CallCollector, call_of, json_values
from tailrace.chat.tool_parsers.protocol import CallForm, FoundCall, ParsedCalls, ToolParser
from tailrace_protos.chat import ToolSchema

_BEGIN, _END = "<tool_call>", "</tool_call>"


class HermesParser(ToolParser):
    """Format `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, one or more."""

    special_texts = (_BEGIN, _END)
    begins = (_BEGIN,)
    template_call = re.compile(r"<tool_call>\s*\{")
    call_form = CallForm(f"{_BEGIN}\n", f"\n{_END}", "\n")

    def parse(self, text: str, tools: Sequence[ToolSchema]) -> ParsedCalls:
        """See `ToolParser`; the last block may lack its end tag."""
        found = CallCollector()
        found.blocks(text, _BEGIN, _END, _calls)
        return found.parsed()


def _calls(text: str) -> Iterable[FoundCall]:
    """Calls of one block: usually one, sometimes one per line."""
    return [call_of(value) for value in json_values(text)]
