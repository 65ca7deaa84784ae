"""Reasoning parsers by name, one format per file.

They separate a reply's thoughts from its answer while text arrives. `REASONING_PARSERS` is in the order
in which `auto` tries them. A new format is a file here and a line below.
"""

from tailrace.chat.reasoning.harmony import HarmonyParser
from tailrace.chat.reasoning.protocol import (
    NoReasoning,
    ReasoningParser,
    ReasoningSplitter,
    Split,
    ThoughtMarks,
)
from tailrace.chat.reasoning.think import ThinkParser

REASONING_PARSERS: dict[str, ReasoningParser] = {
    "harmony": HarmonyParser(),
    "think": ThinkParser(),
    "none": NoReasoning(),
}

__all__ = ["REASONING_PARSERS", "ReasoningParser", "ReasoningSplitter", "Split", "ThoughtMarks"]
