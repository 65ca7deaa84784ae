"""What users write against: environments, rewards, tools, policies. Needs no model library."""

from tailrace.channel.generation import Generation
from tailrace.foreign import ForeignCodeError, foreign_code
from tailrace.sdk.env import Env
from tailrace.sdk.policy import GenerationFailedError, Policy
from tailrace.sdk.reward import RewardFunction, reward
from tailrace.sdk.tool import Tool, ToolOffer, ToolOutput, ToolSession, ToolUnavailableError, tool

__all__ = [
    "Env",
    "ForeignCodeError",
    "Generation",
    "GenerationFailedError",
    "Policy",
    "RewardFunction",
    "Tool",
    "ToolOffer",
    "ToolOutput",
    "ToolSession",
    "ToolUnavailableError",
    "foreign_code",
    "reward",
    "tool",
]
