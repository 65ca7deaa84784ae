"""One episode of any kind (environment, agent loop, workflow) with a local model or an endpoint."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any

from tailrace.config import ConfigError
from tailrace.foreign import ForeignCodeError, foreign_code
from tailrace.import_path import load_object
from tailrace.policy.activity import Stages
from tailrace.sdk.tool import AnyTool
from tailrace.sdk.workflow import Workflow, load_workflow
from tailrace.tools import LocalTools
from tailrace.tools.running import Threads
from tailrace_agents.adapters.player_factory import PlayerFactory, WorkflowStage
from tailrace_agents.adapters.workflow_inline import InlineRunner
from tailrace_agents.config import WorkflowArgs
from tailrace_agents.core.episode import EpisodeResult
from tailrace_agents.core.model import EpisodeModel
from tailrace_agents.core.settlement import score_item
from tailrace_agents.core.token_policy import TokenModel
from tailrace_agents.ports import NoJournal
from tailrace_cli.experiment import Experiment
from tailrace_cli.terminal.endpoint import EndpointModel
from tailrace_cli.terminal.gateway import TerminalGateway
from tailrace_cli.terminal.relay import Relay
from tailrace_cli.terminal.screen import Screen
from tailrace_cli.terminal.wire import Endpoint
from tailrace_protos.episode import EnvTask, EpisodeTask
from tailrace_protos.reward import Score, ScoreItem
from tailrace_reward.adapters.components import open_components
from tailrace_reward.config import RewardConfig
from tailrace_reward.core.scoring import Scorer
from tailrace_reward.ports import ComponentFailedError

if TYPE_CHECKING:  # torch, which episodes at an endpoint do without
    from tailrace_cli.terminal.model import LocalModel

WALL_CLOCK_S = 600.0


class Stage:
    """Parts of an episode in the terminal."""

    def __init__(
        self, experiment: Experiment, tag: str, task_seed: int, screen: Screen, tools: Sequence[AnyTool]
    ) -> None:
        self._experiment = experiment
        self._tag = tag
        self._screen = screen
        self._tools = LocalTools(tools)
        agents = experiment.agents
        threads = ThreadPoolExecutor(agents.env_threads, "env")
        self._factory = PlayerFactory(agents, experiment.run, experiment.source, threads, Stages())
        env_task = EnvTask(tag, task_seed, task_seed)
        deadline = time.time() + WALL_CLOCK_S
        self.task = EpisodeTask("terminal.0", "terminal", 0, 0, "eval", env_task, deadline)

    async def play(self, model: LocalModel) -> EpisodeResult:
        """Plays with a model in this process."""
        async with model.policy as policy:
            return await self._play(
                TokenModel(model.renderer, policy),
                lambda: TerminalGateway(self._experiment, model.renderer, policy, self._screen),
            )

    async def play_at(self, endpoint: Endpoint) -> EpisodeResult:
        """Plays with the model of an endpoint."""
        return await self._play(
            EndpointModel(endpoint, self._screen), lambda: Relay(endpoint, self._screen)
        )

    async def _play(
        self, model: EpisodeModel, make_sessions: Callable[[], TerminalGateway | Relay]
    ) -> EpisodeResult:
        async with AsyncExitStack() as stack:
            stack.push_async_callback(self._tools.close)
            workflow = None
            if (args := self._experiment.agents.workflow) is not None:
                runner = await self._runner(stack, args)
                workflow = WorkflowStage(runner, await stack.enter_async_context(make_sessions()))
            players = self._factory.players(model, self._tools, lambda: False, workflow, self._screen)
            return await players[self._tag].play(self.task, NoJournal())

    async def _runner(self, stack: AsyncExitStack, args: WorkflowArgs) -> InlineRunner:
        if args.mode == "outside":
            raise ConfigError(
                "agents.workflow.mode: outside has no class to run here: its agents play over HTTP"
            )
        workflow: Workflow = load_workflow(args.agent, args.kwargs, "agents.workflow")
        runner = InlineRunner(workflow, args)
        await runner.start()
        stack.push_async_callback(runner.close)
        return runner


class InProcessFunction:
    """`Component` of a function without a process of its own: plain functions run in threads.

    One that never returns does not keep the command from ending.
    """

    def __init__(self, function: str, timeout_s: float, args: Mapping[str, Any]) -> None:
        self._function = function
        self._timeout_s = timeout_s
        self._args = args
        self._threads = Threads()

    async def score(self, item: ScoreItem) -> float:
        """See `Component`."""
        function = load_object(self._function, "reward.rewards.function")
        arguments = (item.task, item.messages, item.metrics)
        try:
            async with asyncio.timeout(self._timeout_s):
                if inspect.iscoroutinefunction(function):
                    with foreign_code(self._function):
                        return float(await function(*arguments, **self._args))
                scored = self._threads.run(
                    self._function, lambda: float(function(*arguments, **self._args))
                )
                return float(await scored)
        except TimeoutError as error:
            reason = f"took longer than {self._timeout_s:g} s"
            raise ComponentFailedError(self._function, reason) from error
        except ForeignCodeError as error:
            raise ComponentFailedError(self._function, str(error)) from error


async def score_here(config: RewardConfig, task: EpisodeTask, result: EpisodeResult) -> Score | None:
    """Scores a valid episode by the reward service's components, in this process."""
    if not result.outcome.is_valid:
        return None
    components = await open_components(config, "the experiment", InProcessFunction)
    try:
        (score,) = await Scorer(config.components, components.by_name).score([score_item(task, result)])
    finally:
        await components.close()
    return score
