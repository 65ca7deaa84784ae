"""Counts of the episodes of this process by stage."""

from dataclasses import dataclass


@dataclass(slots=True)
class Stages:
    """Episodes in each stage; the code that makes them wait counts them."""

    num_generating: int = 0
    num_in_tools: int = 0
    num_in_reward: int = 0
    num_settling: int = 0
