"""What an episode is given, and what it comes to."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec

from tailrace_agents.core.tokens import EpisodeBooks, EpisodeTokens
from tailrace_protos.chat import ChatMessage
from tailrace_protos.episode import Outcome
from tailrace_protos.generation import SamplingParams

_MASK_64 = (1 << 64) - 1


class EpisodeLimits(NamedTuple):
    """When an episode ends although its environment goes on."""

    max_episode_tokens: int  # that the policy sees at once, inserted and sampled together
    max_new_tokens: int  # sampled, over all turns
    max_tokens_per_step: int  # sampled, in one turn
    wall_clock_s: float

    def turn_budget(self, tokens: EpisodeTokens) -> int:
        """How many tokens the next turn may sample; 0 or less: none is left."""
        left = min(self.max_new_tokens - tokens.num_sampled, self.max_episode_tokens - tokens.num_shown)
        return min(left, self.max_tokens_per_step)


class SamplingPlan(NamedTuple):
    """Sampling parameters of every turn; with a seed each turn has its own, always the same."""

    params: SamplingParams
    seed: int | None = None

    def for_turn(self, turn: int) -> SamplingParams:
        """The parameters of turn `turn`."""
        if self.seed is None:
            return self.params
        return msgspec.structs.replace(self.params, seed=mix_seed(self.seed, turn))


def mix_seed(*parts: int) -> int:
    """A 63-bit seed that depends on every part and on their order (splitmix64)."""
    state = 0
    for part in parts:
        state = (state + part + 0x9E3779B97F4A7C15) & _MASK_64
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK_64
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK_64
        state ^= state >> 31
    return state >> 1


@dataclass(slots=True)
class EpisodeResult:
    """An episode that ended: its tokens, how it ended, and what a reward may look at."""

    outcome: Outcome = Outcome.OK
    reason: str = ""
    tokens: EpisodeBooks = field(default_factory=EpisodeTokens)
    messages: list[ChatMessage] = field(default_factory=list)  # user, assistant, user, ...
    metrics: dict[str, float] = field(default_factory=dict)
    row: dict[str, Any] = field(default_factory=dict)  # of the data set, for rewards
    num_replayed_turns: int = 0
    num_restarts: int = 0  # times a replay did not fit and the episode began anew


class EpisodeHandedBackError(Exception):
    """The worker drains: the episode stops between two turns, for another worker to resume."""
