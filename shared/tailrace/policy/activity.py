"""What the episodes of this process are doing at this moment."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Stages:
    """Episodes in each stage, counted by whoever makes them wait."""

    num_generating: int = 0
    num_in_tools: int = 0
    num_in_reward: int = 0
    num_settling: int = 0
