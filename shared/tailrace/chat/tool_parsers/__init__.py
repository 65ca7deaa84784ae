"""Tool parsers by name, one format per file.

`TOOL_PARSERS` is in the order in which `auto` tries them. A new format is a file here and a line below.
"""

from tailrace.chat.tool_parsers.deepseek import DeepSeekParser
from tailrace.chat.tool_parsers.glm45 import Glm45Parser
from tailrace.chat.tool_parsers.gpt_oss import GptOssParser
from tailrace.chat.tool_parsers.hermes import HermesParser
from tailrace.chat.tool_parsers.llama3_json import Llama3JsonParser
from tailrace.chat.tool_parsers.mistral import MistralParser
from tailrace.chat.tool_parsers.protocol import (
    CallForm,
    FoundCall,
    NoToolCalls,
    ParsedCalls,
    ToolParser,
)
from tailrace.chat.tool_parsers.pythonic import PythonicParser
from tailrace.chat.tool_parsers.qwen3_coder import Qwen3CoderParser

TOOL_PARSERS: dict[str, ToolParser] = {
    "gpt_oss": GptOssParser(),
    "qwen3_coder": Qwen3CoderParser(),
    "glm45": Glm45Parser(),
    "hermes": HermesParser(),
    "mistral": MistralParser(),
    "deepseek": DeepSeekParser(),
    "llama3_json": Llama3JsonParser(),
    "pythonic": PythonicParser(),
    "none": NoToolCalls(),
}

__all__ = ["TOOL_PARSERS", "CallForm", "FoundCall", "ParsedCalls", "ToolParser"]
