"""Deterministic careless players of every environment."""

from __future__ import annotations

import hashlib
import importlib.util
import random
import sys
from collections.abc import Sequence
from typing import Any

from tailrace.sdk.env import Env
from tailrace_envs import make_env

WORDS = ["Left", "Down", "Right", "Up", "no"]
CLICKS = ["back to search", "next >", "< prev", "red", "small", "lemon", "features", "buy now", "b012"]
SHOPPING = ["search[red lamp]", "search[tea]", *(f"click[{name}]" for name in CLICKS)]
# Configuration, and replies of a careless player.
KINDS: dict[str, tuple[dict[str, Any], Sequence[str]]] = {
    "frozen_lake": ({"is_slippery": True}, WORDS),
    "sokoban": ({}, WORDS),
    "webshop": ({"items_per_page": 3}, SHOPPING),
    "maths": ({"max_attempts": 5}, ["#### 3", "hm", "#### 12", "#### 1/2"]),
    "gymnasium": ({"id": "Blackjack-v1", "actions": ["stick", "hit"]}, ["hit", "stick", "what"]),
}
if importlib.util.find_spec("reasoning_gym"):  # in the environment of make test-envs
    _LEGS = {"gym": "leg_counting", "num_train_examples": 80, "num_eval_examples": 80}
    KINDS["verifiers"] = (
        {"env_id": "verifiers:ReasoningGymEnv", "env_args": _LEGS},
        ["<answer>64</answer>", "many", "<answer></answer>"],
    )


def replies_of(kind: str, seed: int) -> list[str]:
    """Enough replies to end every episode."""
    return random.Random(seed).choices(list(KINDS[kind][1]), k=60)


class Playing:
    """Episode of an environment, one step at a time."""

    def __init__(self, kind: str, seed: int) -> None:
        self.env: Env = make_env(kind, KINDS[kind][0])
        self.seen: list[object] = [self.env.reset(seed=seed)]
        self._replies = iter(replies_of(kind, seed))
        self.is_over = False

    def step(self) -> None:
        reply = next(self._replies, None)
        if self.is_over or reply is None:
            self.is_over = True
            return
        step = self.env.step(reply)
        self.seen.append(step)
        self.is_over = step[2] or step[3]


def played(kind: str, seed: int) -> list[object]:
    """All observable results of an episode."""
    playing = Playing(kind, seed)
    while not playing.is_over:
        playing.step()
    return playing.seen


def fingerprint(seeds: Sequence[int]) -> str:
    """Digest of all episodes of all environments, played in this order, listed by seed."""
    seen = {(kind, seed): repr(played(kind, seed)) for seed in seeds for kind in KINDS}
    return hashlib.sha256("\n".join(seen[key] for key in sorted(seen)).encode()).hexdigest()


if __name__ == "__main__":
    sys.stdout.write(fingerprint(list(map(int, sys.argv[1:]))))
