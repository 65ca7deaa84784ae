"""Chat rendering without a model library: messages to token ids, turn by turn, and replies back.

Sampled tokens are never encoded again; only the text that new messages insert is rendered. Replies are
parsed from their tokens into reasoning, content and tool calls.
"""

from tailrace.chat.parsers import check_parser_names, load_parsers
from tailrace.chat.pieces import TemplateNotAppendableError
from tailrace.chat.reasoning import ReasoningParser, ReasoningSplitter, Split, ThoughtMarks
from tailrace.chat.renderer import Renderer
from tailrace.chat.reply import ParsedReply, ReplyDelta, ReplyStream
from tailrace.chat.template import ChatTemplate, TemplateError
from tailrace.chat.tool_parsers import CallForm, FoundCall, ParsedCalls, ToolParser
from tailrace.chat.tool_parsers.calls import CallCollector, NoCallError, make_call
from tailrace.config.run import ChatArgs

__all__ = [
    "CallCollector",
    "CallForm",
    "ChatArgs",
    "ChatTemplate",
    "FoundCall",
    "NoCallError",
    "ParsedCalls",
    "ParsedReply",
    "ReasoningParser",
    "ReasoningSplitter",
    "Renderer",
    "ReplyDelta",
    "ReplyStream",
    "Split",
    "TemplateError",
    "TemplateNotAppendableError",
    "ThoughtMarks",
    "ToolParser",
    "check_parser_names",
    "load_parsers",
    "make_call",
]
