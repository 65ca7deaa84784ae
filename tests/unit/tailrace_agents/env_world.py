"""Environments, played as a worker plays them."""

from __future__ import annotations

import sys
from collections.abc import Callable
from concurrent.futures import Executor
from typing import Any

from tailrace.chat import Renderer
from tailrace.clock import SystemClock
from tailrace.policy.activity import Stages
from tailrace.sdk.agent_loop import LoopLimits
from tailrace.sdk.env import Env
from tailrace.sdk.policy import Policy
from tailrace_agents.core.env_loop import play_environment
from tailrace_agents.core.environments import EnvHandle
from tailrace_agents.core.episode import EpisodeResult, SamplingPlan
from tailrace_agents.core.machine import Episode, PhaseArgs, PlayContext
from tailrace_agents.core.model import EnvView
from tailrace_agents.core.token_policy import TokenModel
from tailrace_agents.ports import EpisodeJournal, NoJournal
from tailrace_protos.episode import EnvTask, EpisodeTask
from tailrace_protos.generation import SamplingParams

PLAN = SamplingPlan(SamplingParams())
WHOLE = EnvView()


def env_limits(
    max_episode_tokens: int, max_new_tokens: int, max_tokens_per_step: int, wall_clock_s: float
) -> LoopLimits:
    """Limits of an environment's episode."""
    return LoopLimits(
        max_episode_tokens, max_new_tokens, max_tokens_per_step, sys.maxsize, wall_clock_s, 0.0, 0.0, 0
    )


LIMITS = env_limits(4096, 1024, 64, 20.0)


class FixedContext(PlayContext):
    """Context with one sampling plan for all tasks."""

    plan = PLAN

    def sampling(self, task: EpisodeTask) -> SamplingPlan:
        return self.plan


async def play_env(
    env: Env,
    renderer: Renderer,
    policy: Policy,
    *,
    seed: int,
    limits: LoopLimits = LIMITS,
    sampling: SamplingPlan = PLAN,
    view: EnvView = WHOLE,
    journal: EpisodeJournal | None = None,
    threads: Executor | None = None,
    observer: Any = None,
    is_draining: Callable[[], bool] = lambda: False,
    told: set[str] | None = None,
) -> EpisodeResult:
    """Plays the episode that `seed` fixes."""
    clock = SystemClock()
    args = PhaseArgs(sampling.params, limits.max_new_tokens)
    context = FixedContext(
        {"train": args, "eval": args}, limits.max_episode_tokens, clock, Stages(), is_draining
    )
    object.__setattr__(context, "plan", sampling)
    deadline_unix_s = clock.unix_s() + limits.wall_clock_s
    task = EpisodeTask("g0.0", "g0", 0, 0, "train", EnvTask("env", seed), deadline_unix_s)
    return await play_environment(
        EnvHandle(env, threads, told=told),
        Episode(task, context, limits),
        TokenModel(renderer, policy),
        view,
        journal or NoJournal(),
        observer,
    )
