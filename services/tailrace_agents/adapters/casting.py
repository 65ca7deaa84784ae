"""Who plays which tag: the players of a worker, made from its configuration.

What the configuration alone can get wrong shows when the service is built, before any server is asked.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Executor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from tailrace.chat import Renderer
from tailrace.clock import SystemClock
from tailrace.config import ConfigError, RunConfig
from tailrace.data import Dataset, load_dataset
from tailrace.data.rows import require_prompt
from tailrace.foreign import ForeignCodeError, foreign_code
from tailrace.loops import AGENT_LOOPS, agent_loops, unknown_loop
from tailrace.policy.activity import Stages
from tailrace.sdk.agent_loop import AgentLoop, LoopLimits
from tailrace.sdk.env import Env
from tailrace.sdk.policy import Policy
from tailrace_agents.adapters.pictures import Pictures
from tailrace_agents.config import AgentsConfig, EnvEntry, GeneratingArgs, check_with_run
from tailrace_agents.core.env_player import EnvPlayer
from tailrace_agents.core.environments import EnvPool
from tailrace_agents.core.loops.observer import LoopObserver
from tailrace_agents.core.loops.play import LoopPlan
from tailrace_agents.core.loops.player import LoopPlayer, ToolSource, row_of
from tailrace_agents.core.players import EpisodePlayer, PhaseArgs, PlayContext
from tailrace_agents.core.step_tokens import StepTokens
from tailrace_agents.core.tokens import EpisodeTokens
from tailrace_agents.core.workflow_player import (
    Sessions,
    WorkflowPlayer,
    WorkflowRunner,
    WorkflowTerms,
)
from tailrace_agents.ports import MakeRecorder, Recorder
from tailrace_envs import env_maker, make_env
from tailrace_protos.episode import EpisodeTask
from tailrace_protos.generation import SamplingParams
from tailrace_protos.session import ExportStyle


class WorkflowStage(NamedTuple):
    """What a workflow needs: where it runs, and its door to the gateway."""

    runner: WorkflowRunner
    sessions: Sessions


class Watcher(LoopObserver, Protocol):
    """Sees episodes of every kind."""

    def recorder(self, env: Env, task: EpisodeTask) -> Recorder | None:
        """Who sees an environment's episode."""


class Cast:
    """The players, in two steps: made from the configuration, then given a policy."""

    def __init__(
        self, config: AgentsConfig, run: RunConfig, source: str, threads: Executor, stages: Stages
    ) -> None:
        try:
            check_with_run(config, run)
        except ValueError as error:
            raise ConfigError(f"{source}: {error}") from error
        self._config = config
        self._run = run
        self._stages = stages
        self._pools = make_pools(config, source, threads, stages)
        self.loops = agent_loops(config.agent_loops, f"{source}: agents.agent_loops")
        self.datasets = load_datasets(config, self.loops, run.seed, source)

    def players(
        self,
        renderer: Renderer,
        policy: Policy,
        tools: ToolSource,
        is_draining: Callable[[], bool],
        workflow: WorkflowStage | None = None,
        watcher: Watcher | None = None,
    ) -> dict[str, EpisodePlayer]:
        """A player for every tag. Raises `TemplateError` if the model cannot play what is asked.

        `workflow` is needed if the configuration names one. `watcher` sees every episode, in the
        place of those who draw pictures.
        """
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
            greedy_baseline=config.greedy_baseline,
            seeded_rollouts=config.seeded_rollouts,
        )
        players = {
            **self._env_players(context, watcher),
            **self._loop_players(context, tools, watcher),
        }
        return {**players, **self._workflow_players(context, workflow)} if workflow else players

    def _env_players(self, context: PlayContext, watcher: Watcher | None) -> dict[str, EpisodePlayer]:
        if self._pools:
            context.renderer.require_plain_turns()
        entries = self._config.custom_envs
        recorders: MakeRecorder = Pictures(render_folder(self._run), self._config.render_episodes)
        if watcher is not None:
            recorders = watcher.recorder
        return {
            name: EnvPlayer(
                pool,
                context,
                entries[name].max_tokens_per_step,
                recorders,
                self._token_books(entries[name]),
            )
            for name, pool in self._pools.items()
        }

    def _token_books(self, entry: EnvEntry) -> Callable[[], EpisodeTokens]:
        if self._run.granularity == "step":
            return partial(StepTokens, entry.history_turns)
        return EpisodeTokens

    def _loop_players(
        self, context: PlayContext, tools: ToolSource, watcher: Watcher | None
    ) -> dict[str, EpisodePlayer]:
        return {
            name: LoopPlayer(dataset, self.loops, self._plan(name), context, tools, watcher)
            for name, dataset in self.datasets.items()
            if not self._config.is_played_by_workflow(name)
        }

    def _workflow_players(
        self, context: PlayContext, workflow: WorkflowStage
    ) -> dict[str, EpisodePlayer]:
        args = self._config.workflow
        assert args is not None
        style = self._style(args.export_style)
        terms = WorkflowTerms(style, args.turn_discount, args.timeout_s)
        return {
            name: WorkflowPlayer(*workflow, context, terms, partial(_data_of, dataset))
            for name, dataset in self.datasets.items()
            if self._config.is_played_by_workflow(name)
        }

    def _style(self, given: str | None) -> ExportStyle:
        return self._run.export_style if given is None else ExportStyle(given)

    def _plan(self, name: str) -> LoopPlan:
        """How the rows of a data set are played."""
        args = self._config.loop_args
        limits = loop_limits(self._config, self._config.datasets[name].max_tokens_per_step)
        style = self._style(args.export_style)
        return LoopPlan(limits, style, args.turn_discount, self._run.chat.reasoning)


def loop_limits(config: AgentsConfig, max_tokens_per_step: int) -> LoopLimits:
    """Limits of loops' episodes; sampled tokens and time are each phase's and task's own."""
    args = config.loop_args
    return LoopLimits(
        max_episode_tokens=config.max_episode_tokens,
        max_new_tokens=0,
        max_tokens_per_step=max_tokens_per_step,
        max_turns=args.max_turns,
        wall_clock_s=0.0,
        max_tool_s=args.max_tool_s,
        tool_timeout_s=args.tool_timeout_s,
        max_tool_output_chars=args.max_tool_output_chars,
    )


def _data_of(dataset: Dataset, task: EpisodeTask) -> dict[str, Any]:
    return row_of(dataset, task).data


def make_pools(
    config: AgentsConfig, source: str, threads: Executor, stages: Stages
) -> dict[str, EnvPool]:
    """A pool per entry of `custom_envs`; each is tried once, so that mistakes show at the start."""
    pools = {}
    for name, entry in config.custom_envs.items():
        make = partial(make_env, entry.env_type, entry.env_config)
        try:
            with foreign_code("making the environment"):
                make().close()
        except ForeignCodeError as error:
            reason = error.error if isinstance(error.error, ValueError) else error
            raise ConfigError(f"{source}: agents.custom_envs.{name}: {reason}") from error
        in_threads = entry.in_threads
        if in_threads is None:
            in_threads = bool(getattr(env_maker(entry.env_type), "waits", False))
        pools[name] = EnvPool(make, threads if in_threads else None, stages)
    return pools


def load_datasets(
    config: AgentsConfig, loops: Mapping[str, type[AgentLoop]], seed: int, source: str
) -> dict[str, Dataset]:
    """The data sets, their rows checked against whoever plays them."""
    datasets = {}
    for name, entry in config.datasets.items():
        datasets[name] = dataset = load_dataset(entry, seed, f"{source}: agents.datasets.{name}")
        if config.is_played_by_workflow(name):
            continue
        for row in dataset.rows:
            agent_name = row.data["agent_name"]
            if agent_name not in loops:
                raise ConfigError(f"{row.origin}: key 'agent_name': {unknown_loop(agent_name, loops)}")
            if agent_name in AGENT_LOOPS:
                require_prompt(row)
    return datasets


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
