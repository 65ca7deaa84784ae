"""What users write against: environments, rewards, policies. Needs no model library."""

from tailrace.channel.generation import Generation
from tailrace.foreign import ForeignCodeError, foreign_code
from tailrace.sdk.env import Env
from tailrace.sdk.policy import GenerationFailedError, Policy
from tailrace.sdk.reward import RewardFunction, reward

__all__ = [
    "Env",
    "ForeignCodeError",
    "Generation",
    "GenerationFailedError",
    "Policy",
    "RewardFunction",
    "foreign_code",
    "reward",
]
