"""One episode of an agent loop, from its row to its end: bounded, resumable, typed.

Invariants: whatever the loop or its tools do ends this episode only; tools are released before the
episode ends; the deadline counts although a loop swallows its cancellation.
"""

from __future__ import annotations

import asyncio
import copy
from dataclasses import dataclass
from typing import Any

from tailrace.config.chat import ReasoningPolicy
from tailrace.foreign import ForeignCodeError, foreign_code
from tailrace.ledger import Ledger
from tailrace.sdk.agent_loop import AgentLoop, EpisodeOverError, LoopLimits
from tailrace.sdk.policy import GenerationFailedError
from tailrace.tools.episode_tools import EpisodeTools, ToolsMissingError
from tailrace_agents.core.episode import EpisodeHandedBackError, EpisodeResult
from tailrace_agents.core.loops.books import LedgerBooks
from tailrace_agents.core.loops.fate import Fate, ToolInfraError
from tailrace_agents.core.loops.journal import LoopJournal
from tailrace_agents.core.loops.observer import LoopObserver
from tailrace_agents.core.loops.policy import LoopPolicy
from tailrace_agents.core.loops.tools import BoundTools
from tailrace_agents.core.players import PlayContext
from tailrace_agents.ports import EpisodeJournal, EpisodeTakenError
from tailrace_protos.episode import OVER_BUDGET, EpisodeTask, Outcome
from tailrace_protos.session import ExportStyle
from tailrace_protos.trajectory import Trajectory


@dataclass(frozen=True)
class LoopPlan:
    """How the rows of one data set are played."""

    limits: LoopLimits  # `max_new_tokens` and `wall_clock_s` are each task's own
    export_style: ExportStyle
    turn_discount: float
    reasoning: ReasoningPolicy = "keep"


class LoopEpisode:
    """One row, played once."""

    def __init__(
        self,
        loop_class: type[AgentLoop],
        row: dict[str, Any],
        task: EpisodeTask,
        plan: LoopPlan,
        context: PlayContext,
        observer: LoopObserver | None = None,
    ) -> None:
        self._loop_class = loop_class
        self._row = row
        self._task = task
        self._limits = plan.limits._replace(
            max_new_tokens=context.phases[task.phase].max_new_tokens,
            wall_clock_s=context.wall_clock_s(task),
        )
        self._context = context
        self._observer = observer
        self._fate = Fate()
        self._metrics: list[dict[str, float]] = []
        ledger = Ledger(context.renderer, reasoning=plan.reasoning)
        self._books = LedgerBooks(ledger, plan.export_style, plan.turn_discount)

    async def play(self, tools: EpisodeTools, journal: EpisodeJournal) -> EpisodeResult:
        """Play to the end; raises `EpisodeHandedBackError` and `EpisodeTakenError` only."""
        result = EpisodeResult(tokens=self._books, row=self._row)
        known = LoopJournal(journal, await journal.load())
        deadline = asyncio.timeout(self._limits.wall_clock_s)
        try:
            async with deadline:
                self._close(result, await self._run(tools, known))
        except TimeoutError:
            if not deadline.expired():
                raise
        except ForeignCodeError as error:
            result.outcome, result.reason = blame(error, self._books.num_turns)
            if result.outcome is Outcome.POLICY_FAILURE:
                self._metrics.append({OVER_BUDGET: 1.0})
        except ToolsMissingError as error:
            result.outcome, result.reason = Outcome.INFRA_FAILURE, str(error)
        self._judge(result, deadline.expired())
        result.num_replayed_turns = known.num_replayed
        if result.tokens.num_turns:
            result.messages = list(self._books.ledger.messages())
        return result

    async def _run(self, tools: EpisodeTools, journal: LoopJournal) -> Trajectory:
        context = self._context
        where = f"agent loop {self._loop_class.__name__}"
        async with tools:
            bound = BoundTools(
                tools, await tools.schemas(), journal, self._limits, self._fate,
                context.clock, context.stages, self._observer,
            )  # fmt: skip
            policy = LoopPolicy(
                self._task, context, self._limits, self._books, journal, bound, self._fate,
                self._observer,
            )  # fmt: skip
            self._metrics.append(bound.counts)
            with foreign_code(where):
                loop = self._loop_class()
                made = await loop.run(copy.deepcopy(self._row), policy)
                if not isinstance(made, Trajectory):
                    found = type(made).__name__
                    raise TypeError(f"run() must return policy.finish(...), found {found}")
                return made

    def _close(self, result: EpisodeResult, made: Trajectory) -> None:
        result.outcome, result.reason = made.outcome, made.reason
        self._metrics.append(made.metrics)

    def _judge(self, result: EpisodeResult, is_late: bool) -> None:
        """Let what the loop cannot decide overrule what it said."""
        match self._fate.error:
            case EpisodeTakenError() | EpisodeHandedBackError() as order:
                raise order
            case GenerationFailedError() | ToolInfraError() as failure:
                result.outcome, result.reason = Outcome.INFRA_FAILURE, str(failure)
        if is_late:
            result.outcome = Outcome.TIMEOUT
            result.reason = f"the deadline passed after {self._books.num_turns} model calls"
        elif result.outcome is Outcome.OK and not self._books.num_turns:
            result.outcome = Outcome.INFRA_FAILURE
            result.reason = "the agent loop ended without a model call: nothing can be learnt from it"
        for counts in (self._books.ledger.counts(), *self._metrics):
            result.metrics.update(counts)
        if result.outcome is Outcome.POLICY_FAILURE:
            result.metrics.setdefault("success", 0.0)


def blame(error: ForeignCodeError, num_turns: int) -> tuple[Outcome, str]:
    """What an exception of the loop comes to after `num_turns` calls, if no fatal one is behind it."""
    over = error.error
    if isinstance(over, ExceptionGroup):
        found = over.subgroup(EpisodeOverError)
        over = found.exceptions[0] if found is not None else over
    if not isinstance(over, EpisodeOverError):
        return Outcome.INFRA_FAILURE, str(error)
    if not num_turns:
        return Outcome.INFRA_FAILURE, f"before the first model call: {over}"
    return Outcome.POLICY_FAILURE, str(over)
