"""Chat rendering without a model library: messages in, token ids out, appended turn by turn.

Tokens of the model are never encoded again: only what new messages insert is rendered. Replies are
read from their tokens: thoughts, content, tool calls.
"""

from tailrace.chat.config import ChatArgs
from tailrace.chat.pieces import TemplateNotAppendableError
from tailrace.chat.renderer import Renderer
from tailrace.chat.reply import ParsedReply, ReplyDelta, ReplyStream
from tailrace.chat.template import ChatTemplate, TemplateError

__all__ = [
    "ChatArgs",
    "ChatTemplate",
    "ParsedReply",
    "Renderer",
    "ReplyDelta",
    "ReplyStream",
    "TemplateError",
    "TemplateNotAppendableError",
]
