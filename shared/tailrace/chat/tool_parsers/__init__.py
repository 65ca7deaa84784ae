"""Tool-call parsers: the calls in a reply, one file per format, behind one protocol."""

from tailrace.chat.tool_parsers.deepseek import DeepSeekParser
from tailrace.chat.tool_parsers.gpt_oss import GptOssParser
from tailrace.chat.tool_parsers.hermes import HermesParser
from tailrace.chat.tool_parsers.llama3_json import Llama3JsonParser
from tailrace.chat.tool_parsers.mistral import MistralParser
from tailrace.chat.tool_parsers.protocol import FoundCall, ParsedCalls, ToolParser
from tailrace.chat.tool_parsers.pythonic import PythonicParser
from tailrace.chat.tool_parsers.qwen3_coder import Qwen3CoderParser
from tailrace.chat.tool_parsers.silent import SilentParser

TOOL_PARSERS: dict[str, ToolParser] = {
    "hermes": HermesParser(),
    "qwen3_coder": Qwen3CoderParser(),
    "llama3_json": Llama3JsonParser(),
    "mistral": MistralParser(),
    "deepseek": DeepSeekParser(),
    "gpt_oss": GptOssParser(),
    "pythonic": PythonicParser(),
    "none": SilentParser(),
}

__all__ = ["TOOL_PARSERS", "FoundCall", "ParsedCalls", "ToolParser"]
