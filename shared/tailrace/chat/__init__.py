"""Chat rendering without a model library: text in, token ids out, appended turn by turn.

Tokens of the model are never encoded again: only what a new message inserts is rendered.
"""

from tailrace.chat.pieces import TemplateNotAppendableError
from tailrace.chat.renderer import Renderer
from tailrace.chat.template import ChatTemplate, TemplateError

__all__ = ["ChatTemplate", "Renderer", "TemplateError", "TemplateNotAppendableError"]
