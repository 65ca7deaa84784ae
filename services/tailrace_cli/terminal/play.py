"""One episode of any kind - environment, agent loop, workflow - with a local model or an endpoint."""

from __future__ import annotations

import asyncio
import copy
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any

from tailrace.clock import SystemClock
from tailrace.foreign import ForeignCodeError, foreign_code
from tailrace.policy.activity import Stages
from tailrace.sdk.agent_loop import EpisodeOverError, LoopLimits
from tailrace.sdk.tool import AnyTool
from tailrace.sdk.workflow import Workflow, load_workflow
from tailrace.tools import EpisodeTools, LocalTools, ToolsMissingError
from tailrace_agents.adapters.casting import Cast, WorkflowStage, loop_limits, sampling_params
from tailrace_agents.adapters.workflow_inline import InlineRunner
from tailrace_agents.config import WorkflowArgs
from tailrace_agents.core.environments import EnvHandle
from tailrace_agents.core.episode import EpisodeResult
from tailrace_agents.core.loops.fate import Fate
from tailrace_agents.core.loops.journal import LoopJournal
from tailrace_agents.core.loops.play import blame
from tailrace_agents.core.loops.player import row_of
from tailrace_agents.core.loops.tools import BoundTools
from tailrace_agents.ports import NoJournal
from tailrace_cli.experiment import Experiment
from tailrace_cli.terminal.endpoint import EndpointPolicy
from tailrace_cli.terminal.gateway import TerminalGateway
from tailrace_cli.terminal.relay import Relay, UnknownCallError
from tailrace_cli.terminal.screen import Screen
from tailrace_cli.terminal.wire import Endpoint, EndpointError
from tailrace_envs import make_env
from tailrace_protos.chat import ChatMessage, ToolSchema
from tailrace_protos.episode import EnvTask, EpisodeTask, Outcome
from tailrace_protos.session import SessionOpened

if TYPE_CHECKING:  # torch, which episodes at an endpoint do without
    from tailrace_cli.terminal.model import LocalModel

WALL_CLOCK_S = 600.0


class Stage:
    """What an episode in the terminal is played with."""

    def __init__(
        self, experiment: Experiment, tag: str, task_seed: int, screen: Screen, tools: Sequence[AnyTool]
    ) -> None:
        self._experiment = experiment
        self._tag = tag
        self._screen = screen
        self._tools = LocalTools(tools)
        agents = experiment.agents
        self._stages = Stages()
        threads = ThreadPoolExecutor(agents.env_threads, "env")
        self._cast = Cast(agents, experiment.run, experiment.source, threads, self._stages)
        env_task = EnvTask(tag, task_seed, task_seed)
        deadline = time.time() + WALL_CLOCK_S
        self.task = EpisodeTask("terminal.0", "terminal", 0, 0, "eval", env_task, deadline)

    async def play(self, model: LocalModel) -> EpisodeResult:
        """Play with a model in this process."""
        async with AsyncExitStack() as stack:
            policy = await stack.enter_async_context(model.policy)
            stack.push_async_callback(self._tools.close)
            workflow = None
            if (args := self._experiment.agents.workflow) is not None:
                door = TerminalGateway(self._experiment, model.renderer, policy, self._screen)
                runner = await self._runner(stack, args)
                workflow = WorkflowStage(runner, await stack.enter_async_context(door))
            players = self._cast.players(
                model.renderer, policy, self._tools, lambda: False, workflow, self._screen
            )
            return await players[self._tag].play(self.task, NoJournal())

    async def play_at(self, endpoint: Endpoint) -> EpisodeResult:
        """Play with the model of an endpoint."""
        agents = self._experiment.agents
        async with AsyncExitStack() as stack:
            stack.push_async_callback(self._tools.close)
            if self._tag in agents.custom_envs:
                return await self._env_at(endpoint)
            row = row_of(self._cast.datasets[self._tag], self.task).data
            if agents.workflow is not None and agents.is_played_by_workflow(self._tag):
                runner = await self._runner(stack, agents.workflow)
                relay = await stack.enter_async_context(Relay(endpoint, self._screen))
                return await _workflow_at(relay, runner, row)
            return await self._loop_at(endpoint, row)

    async def _runner(self, stack: AsyncExitStack, args: WorkflowArgs) -> InlineRunner:
        workflow: Workflow = load_workflow(args.agent, args.kwargs, "agents.workflow")
        runner = InlineRunner(workflow, args)
        await runner.start()
        stack.push_async_callback(runner.close)
        return runner

    async def _loop_at(self, endpoint: Endpoint, row: dict[str, Any]) -> EpisodeResult:
        result = EpisodeResult(row=row)
        session = self._tools.session("terminal.0", row["tools"], create_kwargs=row["tools_kwargs"])
        try:
            async with asyncio.timeout(WALL_CLOCK_S), session:
                policy = self._policy(endpoint, self._bound(session, await session.schemas()))
                result.tokens = policy.books
                await self._run_loop(row, policy, result)
        except ForeignCodeError as error:
            result.outcome, result.reason = blame(error, result.tokens.num_turns)
        except ToolsMissingError as error:
            result.outcome, result.reason = Outcome.INFRA_FAILURE, str(error)
        except TimeoutError:
            result.outcome, result.reason = Outcome.TIMEOUT, f"took more than {WALL_CLOCK_S:g} s"
        return result

    async def _run_loop(
        self, row: dict[str, Any], policy: EndpointPolicy, result: EpisodeResult
    ) -> None:
        try:
            with foreign_code(f"agent loop {row['agent_name']}"):
                loop = self._cast.loops[row["agent_name"]]()
                made = await loop.run(copy.deepcopy(row), policy)
        finally:
            result.messages = policy.conversation
        result.outcome, result.reason = made.outcome, made.reason
        result.metrics.update(made.metrics)

    async def _env_at(self, endpoint: Endpoint) -> EpisodeResult:
        """An environment's words and the model's as messages."""
        entry = self._experiment.agents.custom_envs[self._tag]
        handle = EnvHandle(make_env(entry.env_type, entry.env_config))
        tools = self._bound(self._tools.session("terminal.0", ()), ())
        policy = self._policy(endpoint, tools)
        result = EpisodeResult(tokens=policy.books)
        try:
            beginning = await handle.reset(self.task.task.seed)
            messages = [ChatMessage("user", beginning.observation)]
            while True:
                messages.append(await policy.chat(messages))
                step = await handle.step(messages[-1].content)
                policy.set_reward(step.reward)
                self._screen.line(f"reward {step.reward:g}")
                if step.terminated or step.truncated:
                    result.metrics.update(step.numbers)
                    self._screen.panel("environment, the end", step.observation, "cyan")
                    break
                messages.append(ChatMessage("user", step.observation))
        except (ForeignCodeError, EndpointError) as error:
            result.outcome, result.reason = Outcome.INFRA_FAILURE, str(error)
        except EpisodeOverError as error:
            result.outcome, result.reason = Outcome.POLICY_FAILURE, str(error)
        finally:
            handle.close()
        result.messages = policy.conversation
        return result

    def _bound(self, session: EpisodeTools, schemas: Sequence[ToolSchema]) -> BoundTools:
        journal = LoopJournal(NoJournal())
        return BoundTools(
            session, schemas, journal, self._limits(), Fate(), SystemClock(), self._stages, self._screen
        )

    def _policy(self, endpoint: Endpoint, tools: BoundTools) -> EndpointPolicy:
        sampling = sampling_params(self._experiment.agents.eval_generating_args, ())
        return EndpointPolicy(endpoint, self.task, self._limits(), sampling, tools, self._screen)

    def _limits(self) -> LoopLimits:
        agents = self._experiment.agents
        entry = agents.custom_envs.get(self._tag) or agents.datasets[self._tag]
        limits = loop_limits(agents, entry.max_tokens_per_step)
        if self._tag in agents.custom_envs:  # an environment counts its turns itself
            limits = limits._replace(max_turns=sys.maxsize)
        return limits._replace(
            max_new_tokens=agents.eval_generating_args.max_new_tokens, wall_clock_s=WALL_CLOCK_S
        )


async def _workflow_at(relay: Relay, runner: InlineRunner, row: dict[str, Any]) -> EpisodeResult:
    access = SessionOpened("terminal", relay.base_url, "terminal")
    end = await runner.run(row, access, WALL_CLOCK_S)
    result = EpisodeResult(end.outcome, end.reason, relay.books, relay.conversation, row=row)
    try:
        relay.reward(end.rewards)
    except UnknownCallError as error:
        result.outcome, result.reason = Outcome.INFRA_FAILURE, str(error)
    return result
