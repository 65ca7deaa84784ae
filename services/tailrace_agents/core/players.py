"""Who plays the tasks of a tag, and what every player is given."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import msgspec

from tailrace.chat import Renderer
from tailrace.clock import Clock
from tailrace.policy.activity import Stages
from tailrace.sdk.policy import Policy
from tailrace_agents.core.episode import EpisodeResult, SamplingPlan, mix_seed
from tailrace_agents.ports import EpisodeJournal
from tailrace_protos.episode import EpisodeTask
from tailrace_protos.generation import SamplingParams
from tailrace_protos.subjects import Phase


class EpisodePlayer(Protocol):
    """Plays the tasks of one tag.

    Raises `EpisodeHandedBackError` and `EpisodeTakenError`; all other endings are outcomes.
    """

    async def play(self, task: EpisodeTask, journal: EpisodeJournal) -> EpisodeResult:
        """Play one episode to its end."""


class PhaseArgs(NamedTuple):
    """How the episodes of a phase are sampled."""

    sampling: SamplingParams
    max_new_tokens: int  # of one episode


@dataclass(frozen=True)
class PlayContext:
    """What the players of a worker share."""

    renderer: Renderer
    policy: Policy
    phases: Mapping[Phase, PhaseArgs]
    max_episode_tokens: int
    clock: Clock
    stages: Stages
    is_draining: Callable[[], bool]
    greedy_baseline: bool = False
    seeded_rollouts: bool = False

    def sampling(self, task: EpisodeTask) -> SamplingPlan:
        """Parameters of every turn; turns of evaluations, and of training if asked for, have seeds."""
        params = self.phases[task.phase].sampling
        if is_baseline(task, self.greedy_baseline):
            return SamplingPlan(msgspec.structs.replace(params, temperature=0.0))
        if task.phase == "train":
            seed = mix_seed(task.task.seed, task.task.ordinal, task.member)
            return SamplingPlan(params, seed if self.seeded_rollouts else None)
        return SamplingPlan(params, mix_seed(task.task.seed, task.member))

    def wall_clock_s(self, task: EpisodeTask) -> float:
        """Seconds until the task's deadline."""
        return task.deadline_unix_s - self.clock.unix_s()


def is_baseline(task: EpisodeTask, greedy_baseline: bool) -> bool:
    """Whether the episode is the one of its group that is played greedily: its first member."""
    return greedy_baseline and task.phase == "train" and task.member == 0
