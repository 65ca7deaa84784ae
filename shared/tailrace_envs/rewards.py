"""Checks of the rewards and penalties in an `env_config`."""

import math
from typing import Any

_PENALTY = "invalid_action_penalty"


def check_rewards(config: Any, *keys: str) -> None:
    """Raises `ValueError` for an infinite reward at `keys`, which the agents service refuses at a step,
    and for a penalty of invalid actions that is infinite or negative."""
    for key in (*keys, _PENALTY):
        if math.isinf(getattr(config, key)):
            raise ValueError(f"{key} must be finite: rewards are")
    if getattr(config, _PENALTY) < 0:
        raise ValueError(f"{_PENALTY} must not be negative: it is subtracted")
