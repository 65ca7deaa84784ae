"""How conversations are rendered and replies read: the key `chat` of an experiment."""

from tailrace.config.chat import ChatArgs, ReasoningParserName, ReasoningPolicy, ToolParserName

__all__ = ["ChatArgs", "ReasoningParserName", "ReasoningPolicy", "ToolParserName"]
