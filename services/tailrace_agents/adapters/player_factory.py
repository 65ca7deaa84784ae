"""Factory of players: makes the players of a worker from its configuration.

Mistakes that the configuration alone can have are found when the service is built, before any server is
asked.
"""

from collections.abc import Callable, Mapping
from concurrent.futures import Executor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from msgspec.structs import replace

from tailrace.clock import SystemClock
from tailrace.config import ConfigError, EvaluationArgs, RunConfig
from tailrace.data import Dataset, Row, load_dataset
from tailrace.data.rows import require_prompt
from tailrace.foreign import ForeignCodeError, foreign_call
from tailrace.policy.activity import Stages
from tailrace.sdk.agent_loop import AgentLoop, LoopLimits
from tailrace.sdk.env import Env
from tailrace_agents.adapters.outside_desk import StoredDesk
from tailrace_agents.adapters.pictures import Pictures
from tailrace_agents.config import AgentsConfig, EnvEntry, GeneratingArgs, check_with_run
from tailrace_agents.core.env_loop import EnvPlayer
from tailrace_agents.core.environments import EnvPool
from tailrace_agents.core.loop_player import LoopPlayer, ToolSource, row_of
from tailrace_agents.core.loops import AGENT_LOOPS, agent_loops, unknown_loop
from tailrace_agents.core.machine import EpisodePlayer, PhaseArgs, PlayContext
from tailrace_agents.core.model import EnvView, EpisodeModel, LoopPlan
from tailrace_agents.core.outside_player import OutsidePlayer
from tailrace_agents.core.workflow_player import (
    EpisodeSessions,
    WorkflowPlayer,
    WorkflowRunner,
    WorkflowTerms,
)
from tailrace_agents.ports import MakeObserver, Watcher
from tailrace_envs import env_maker, make_env
from tailrace_protos.episode import EpisodeTask
from tailrace_protos.generation import SamplingParams
from tailrace_protos.session import ExportStyle, RewardScope


class WorkflowStage(NamedTuple):
    """Runner of a workflow, or the desk of outside agents, and sessions with a gateway."""

    runner: WorkflowRunner | StoredDesk
    sessions: EpisodeSessions


class PlayerFactory:
    """Makes the players in two steps: from the configuration, then with a model."""

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
        model: EpisodeModel,
        tools: ToolSource,
        is_draining: Callable[[], bool],
        workflow: WorkflowStage | None = None,
        watcher: Watcher | None = None,
    ) -> dict[str, EpisodePlayer]:
        """Makes a player for every tag. Raises `TemplateError` if the model cannot play what is asked.

        `workflow` is needed if the configuration names one. `watcher` sees every episode; then no
        pictures are drawn.
        """
        config = self._config
        context = PlayContext(
            phases={
                "train": phase_args(config.generating_args, model.stop_token_ids),
                "eval": phase_args(config.eval_generating_args, model.stop_token_ids),
            },
            max_episode_tokens=config.max_episode_tokens,
            clock=SystemClock(),
            stages=self._stages,
            is_draining=is_draining,
            greedy_baseline=config.greedy_baseline,
            seeded_rollouts=config.seeded_rollouts,
            evaluations={
                name: phase_args(_evaluating(config.eval_generating_args, args), model.stop_token_ids)
                for name, args in self._run.evaluations.items()
            },
        )
        players = {
            **self._env_players(context, model, watcher),
            **self._loop_players(context, model, tools, watcher),
        }
        return {**players, **self._workflow_players(context, workflow)} if workflow else players

    def _env_players(
        self, context: PlayContext, model: EpisodeModel, watcher: Watcher | None
    ) -> dict[str, EpisodePlayer]:
        if self._pools:
            model.require_plain_turns()
        entries = self._config.custom_envs
        observers: MakeObserver = Pictures(render_folder(self._run), self._config.render_episodes)
        if watcher is not None:
            observers = watcher.recorder
        return {
            name: EnvPlayer(
                pool,
                context,
                model,
                loop_limits(self._config, entries[name].max_tokens_per_step)._replace(
                    max_turns=entries[name].max_turns
                ),
                EnvView(self._run.export_style, entries[name].history_turns),
                observers,
            )
            for name, pool in self._pools.items()
        }

    def _loop_players(
        self,
        context: PlayContext,
        model: EpisodeModel,
        tools: ToolSource,
        watcher: Watcher | None,
    ) -> dict[str, EpisodePlayer]:
        return {
            name: LoopPlayer(dataset, self.loops, self._plan(name), context, model, tools, watcher)
            for name, dataset in self.datasets.items()
            if not self._config.is_played_by_workflow(name)
        }

    def _workflow_players(
        self, context: PlayContext, workflow: WorkflowStage
    ) -> dict[str, EpisodePlayer]:
        args = self._config.workflow
        assert args is not None
        style = self._style(args.export_style)
        scope = RewardScope(args.reward_scope)
        terms = WorkflowTerms(style, args.turn_discount, args.timeout_s, scope)
        limits = loop_limits(self._config, 0)
        runner, sessions = workflow

        def player(dataset: Dataset) -> EpisodePlayer:
            row_of = partial(_data_of, dataset)
            if isinstance(runner, StoredDesk):
                return OutsidePlayer(runner, sessions, context, limits, terms, args.lease_s, row_of)
            return WorkflowPlayer(runner, sessions, context, limits, terms, row_of)

        return {
            name: player(dataset)
            for name, dataset in self.datasets.items()
            if self._config.is_played_by_workflow(name)
        }

    def _style(self, given: str | None) -> ExportStyle:
        return self._run.export_style if given is None else ExportStyle(given)

    def _plan(self, name: str) -> LoopPlan:
        """Makes the plan of a data set's loops."""
        args = self._config.loop_args
        limits = loop_limits(self._config, self._config.datasets[name].max_tokens_per_step)
        style = self._style(args.export_style)
        scope = RewardScope(args.reward_scope)
        return LoopPlan(limits, style, args.turn_discount, self._run.chat.reasoning, scope)


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
    """Makes a pool per entry of `custom_envs`; tries each once, so that mistakes show at the start."""
    pools = {}
    for name, entry in config.custom_envs.items():
        made_env(entry, f"{source}: agents.custom_envs.{name}").close()
        make = partial(make_env, entry.env_type, entry.env_config)
        in_threads = entry.in_threads
        if in_threads is None:
            in_threads = bool(getattr(env_maker(entry.env_type), "waits", False))
        pools[name] = EnvPool(make, threads if in_threads else None, stages)
    return pools


def made_env(entry: EnvEntry, key: str) -> Env:
    """Makes an environment of an entry; `ConfigError` names `key` and the reason."""
    try:
        with foreign_call("making the environment"):
            return make_env(entry.env_type, entry.env_config)
    except ForeignCodeError as error:
        reason = error.error if isinstance(error.error, ValueError) else error
        raise ConfigError(f"{key}: {reason}") from error


def load_datasets(
    config: AgentsConfig, loops: Mapping[str, type[AgentLoop]], seed: int, source: str
) -> dict[str, Dataset]:
    """Loads the data sets and checks that each row has a known loop."""
    datasets = {}
    for name, entry in config.datasets.items():
        datasets[name] = dataset = load_dataset(entry, seed, f"{source}: agents.datasets.{name}")
        if config.is_played_by_workflow(name):
            continue
        for row in dataset.rows:
            check_row(row, loops)
    return datasets


def check_row(row: Row, loops: Mapping[str, object]) -> None:
    """Raises `ConfigError` for a row that no loop can play."""
    agent_name = row.data["agent_name"]
    if agent_name not in loops:
        raise ConfigError(f"{row.origin}: key 'agent_name': {unknown_loop(agent_name, loops)}")
    if agent_name in AGENT_LOOPS:
        require_prompt(row)


def phase_args(args: GeneratingArgs, stop_token_ids: tuple[int, ...]) -> PhaseArgs:
    """Makes the sampling of a phase from its configuration."""
    sampling = SamplingParams(
        temperature=args.temperature,
        top_p=args.top_p,
        top_k=args.top_k,
        min_p=args.min_p,
        stop_token_ids=stop_token_ids,
        stop=args.stop,
    )
    return PhaseArgs(sampling, args.max_new_tokens)


def _evaluating(args: GeneratingArgs, own: EvaluationArgs) -> GeneratingArgs:
    """Sampling of evaluations, with what a named one sets itself."""
    given = {"temperature": own.temperature, "top_p": own.top_p, "max_new_tokens": own.max_new_tokens}
    return replace(args, **{key: value for key, value in given.items() if value is not None})


def render_folder(run: RunConfig) -> Path:
    """Folder of episodes' pictures."""
    return Path(run.render_save_dir).absolute() if run.render_save_dir else run.run_dir / "renders"
