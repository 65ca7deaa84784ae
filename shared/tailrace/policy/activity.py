"""Counts of the episodes of this process by stage."""

from dataclasses import dataclass, field


@dataclass(slots=True)
class Stages:
    """Episodes in each stage; the code that makes them wait counts them."""

    num_generating: int = 0
    num_in_tools: int = 0
    num_in_reward: int = 0
    num_settling: int = 0
    unleased: dict[str, str] = field(default_factory=dict)
    """Group of each episode that waits for an agent outside of the cluster, by episode."""
