"""Interfaces that users implement: environments, loops, rewards, tools. Needs no model library."""

from tailrace.channel.generation import Generation
from tailrace.foreign import ForeignCodeError, foreign_code
from tailrace.sdk.agent_loop import AgentLoop, ChatReply, EpisodeEnd, EpisodeOverError, EpisodePolicy
from tailrace.sdk.env import Env
from tailrace.sdk.policy import GenerationFailedError, Policy, TurnRequest
from tailrace.sdk.reward import RewardFunction, reward
from tailrace.sdk.tool import Tool, ToolOffer, ToolOutput, ToolSession, ToolUnavailableError, tool
from tailrace.sdk.workflow import PolicyFailureError, Workflow

__all__ = [
    "AgentLoop",
    "ChatReply",
    "Env",
    "EpisodeEnd",
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
    "TurnRequest",
    "Workflow",
    "foreign_code",
    "reward",
    "tool",
]
