"""Who plays which tag: the players of a worker, made from its configuration.

What the configuration alone can get wrong shows when the service is built, before any server is asked.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor
from functools import partial
from pathlib import Path

from tailrace.chat import Renderer
from tailrace.clock import SystemClock
from tailrace.config import ConfigError, RunConfig
from tailrace.envs import make_env
from tailrace.policy.activity import Stages
from tailrace.sdk.policy import Policy
from tailrace_agents.adapters.pictures import Pictures
from tailrace_agents.config import AgentsConfig, GeneratingArgs
from tailrace_agents.core.env_player import EnvPlayer
from tailrace_agents.core.environments import EnvPool
from tailrace_agents.core.players import EpisodePlayer, PhaseArgs, PlayContext
from tailrace_protos.generation import SamplingParams


class Cast:
    """The players, in two steps: made from the configuration, then given a policy."""

    def __init__(
        self, config: AgentsConfig, run: RunConfig, source: str, threads: Executor, stages: Stages
    ) -> None:
        self._config = config
        self._run = run
        self._stages = stages
        self._pools = make_pools(config, source, threads, stages)

    def players(
        self, renderer: Renderer, policy: Policy, is_draining: Callable[[], bool]
    ) -> dict[str, EpisodePlayer]:
        """A player for every tag."""
        config = self._config
        context = PlayContext(
            renderer=renderer,
            policy=policy,
            phases={
                "train": phase_args(config.generating_args, renderer),
                "eval": phase_args(config.eval_generating_args, renderer),
            },
            max_episode_tokens=config.max_episode_tokens,
            clock=SystemClock(),
            stages=self._stages,
            is_draining=is_draining,
        )
        pictures = Pictures(render_folder(self._run), config.render_episodes)
        return {
            name: EnvPlayer(pool, context, config.custom_envs[name].max_tokens_per_step, pictures)
            for name, pool in self._pools.items()
        }


def make_pools(
    config: AgentsConfig, source: str, threads: Executor, stages: Stages
) -> dict[str, EnvPool]:
    """A pool per entry of `custom_envs`; each is tried once, so that mistakes show at the start."""
    pools = {}
    for name, entry in config.custom_envs.items():
        make = partial(make_env, entry.env_type, entry.env_config)
        try:
            make().close()
        except ValueError as error:
            raise ConfigError(f"{source}: agents.custom_envs.{name}: {error}") from error
        pools[name] = EnvPool(make, threads if entry.in_threads else None, stages)
    return pools


def phase_args(args: GeneratingArgs, renderer: Renderer) -> PhaseArgs:
    """How the episodes of a phase are sampled."""
    return PhaseArgs(sampling_params(args, renderer.stop_token_ids), args.max_new_tokens)


def sampling_params(args: GeneratingArgs, stop_token_ids: tuple[int, ...]) -> SamplingParams:
    """The wire's form of the sampling configuration."""
    return SamplingParams(
        temperature=args.temperature,
        top_p=args.top_p,
        top_k=args.top_k,
        min_p=args.min_p,
        stop_token_ids=stop_token_ids,
        stop=args.stop,
    )


def render_folder(run: RunConfig) -> Path:
    """Where pictures of episodes go."""
    return Path(run.render_save_dir).absolute() if run.render_save_dir else run.run_dir / "renders"
