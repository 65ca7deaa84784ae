"""Which parsers read a model's replies when the configuration says `auto`.

Tool calls: the template is asked to render one, and what it writes names the format. Thoughts: harmony
channels, `<think>` in the template or among the tokenizer's tokens, or none.
"""

from __future__ import annotations

import re

from tailrace.chat.config import ChatArgs
from tailrace.chat.reasoning import REASONING_PARSERS, ReasoningParser
from tailrace.chat.special import SpecialTokens
from tailrace.chat.template import ChatTemplate
from tailrace.chat.tool_parsers import TOOL_PARSERS, ToolParser

# What a rendered call of the tool `probe` looks like, in the order of trial.
_CALL_FORMATS = (
    ("gpt_oss", re.compile(r"to=functions\.probe")),
    ("qwen3_coder", re.compile(r"<function=probe>")),
    ("hermes", re.compile(r"<tool_call>")),
    ("mistral", re.compile(r"\[TOOL_CALLS\]")),
    ("deepseek", re.compile(r"<｜tool▁call▁begin｜>")),
    ("llama3_json", re.compile(r'"name":\s*"probe".*"parameters":', re.DOTALL)),
    ("pythonic", re.compile(r"\[probe\(")),
)


def choose_tool_parser(args: ChatArgs, template: ChatTemplate) -> ToolParser:
    """The configured parser, or the one that reads what the template writes (none: nothing known)."""
    name = args.tool_parser
    if name != "auto":
        return TOOL_PARSERS[name]
    written = template.call_text
    return TOOL_PARSERS[next((name for name, form in _CALL_FORMATS if form.search(written)), "none")]


def choose_reasoning_parser(
    args: ChatArgs, template: ChatTemplate, special: SpecialTokens
) -> ReasoningParser:
    """The configured parser, or the one whose markers template or tokenizer know."""
    if args.reasoning_parser != "auto":
        return REASONING_PARSERS[args.reasoning_parser]
    if args.tool_parser == "gpt_oss" or "<|channel|>" in template.source:
        return REASONING_PARSERS["harmony"]
    knows_think = "<think>" in template.source or "<think>" in special.texts.values()
    return REASONING_PARSERS["think" if knows_think else "none"]
