"""Configuration of the reward service: the section `reward` of an experiment file."""

from __future__ import annotations

import re
from typing import Literal

from tailrace.config import Config

_FUNCTION = re.compile(r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$")


class RewardEntry(Config, frozen=True, kw_only=True):
    """One component of the reward."""

    name: str
    """Name of the component in scores and metrics."""

    kind: Literal["env_return", "function"] = "env_return"
    """`env_return`: the sum of the environment's rewards. `function`: a Python function."""

    function: str = ""
    """`module:name` of the function, for example `my_rewards:brevity`, which is a `def brevity(task,
    messages, metrics) -> float`, plain or async. The module is imported from the folder where Tailrace
    was started or from what is installed."""

    weight: float = 1.0
    """Factor of this component in the sum."""

    timeout_s: float = 10.0
    """A call of the function that takes longer is killed; its episode has no reward then and counts as
    an infrastructure failure."""

    def __post_init__(self) -> None:
        if self.kind == "function" and not _FUNCTION.match(self.function):
            raise ValueError(
                f"reward {self.name!r}: function must be written module:name, found {self.function!r}"
            )
        if self.kind == "env_return" and self.function:
            raise ValueError(f"reward {self.name!r}: has a function, so kind must be 'function'")
        if self.timeout_s <= 0:
            raise ValueError(f"reward {self.name!r}: timeout_s must be positive")


class RewardConfig(Config, frozen=True, kw_only=True):
    """The reward service."""

    rewards: tuple[RewardEntry, ...] = (RewardEntry(name="env_return"),)
    """Components; an episode's reward is their weighted sum."""

    num_processes: int = 2
    """Processes that call reward functions; a call occupies one. None is started without functions."""

    mailbox: int = 1024
    """Requests that may wait; one more is refused and comes again later."""

    drain_s: float = 10.0
    """At SIGTERM accepted requests get so long to be answered."""

    def __post_init__(self) -> None:
        names = [entry.name for entry in self.rewards]
        if not names:
            raise ValueError("rewards must name at least one component")
        if len(set(names)) < len(names):
            raise ValueError(f"rewards must have different names, found {', '.join(names)}")
        if self.num_processes < 1 or self.mailbox < 1:
            raise ValueError("num_processes and mailbox must be at least 1")
        if self.drain_s < 0:
            raise ValueError("drain_s must not be negative")
