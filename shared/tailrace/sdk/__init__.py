"""What users write against: environments, agent loops, rewards, tools. Needs no model library."""

from tailrace.channel.generation import Generation
from tailrace.foreign import ForeignCodeError, foreign_code
from tailrace.sdk.agent_loop import AgentLoop, ChatReply, EpisodeOverError, EpisodePolicy
from tailrace.sdk.env import Env
from tailrace.sdk.policy import GenerationFailedError, Policy
from tailrace.sdk.reward import RewardFunction, reward
from tailrace.sdk.tool import Tool, ToolOffer, ToolOutput, ToolSession, ToolUnavailableError, tool
from tailrace.sdk.workflow import PolicyFailureError, Workflow

__all__ = [
    "AgentLoop",
    "ChatReply",
    "Env",
    "EpisodeOverError",
    "EpisodePolicy",
    "ForeignCodeError",
    "Generation",
    "GenerationFailedError",
    "Policy",
    "PolicyFailureError",
    "RewardFunction",
    "Tool",
    "ToolOffer",
    "ToolOutput",
    "ToolSession",
    "ToolUnavailableError",
    "Workflow",
    "foreign_code",
    "reward",
    "tool",
]
