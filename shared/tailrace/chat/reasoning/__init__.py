"""Reasoning parsers: where a reply's thoughts stand, told apart from its answer as text arrives."""

from tailrace.chat.reasoning.harmony import HarmonyParser
from tailrace.chat.reasoning.protocol import ReasoningParser, ReasoningSplitter, Split
from tailrace.chat.reasoning.silent import SilentParser
from tailrace.chat.reasoning.think import ThinkParser

REASONING_PARSERS: dict[str, ReasoningParser] = {
    "think": ThinkParser(),
    "harmony": HarmonyParser(),
    "none": SilentParser(),
}

__all__ = ["REASONING_PARSERS", "ReasoningParser", "ReasoningSplitter", "Split"]
