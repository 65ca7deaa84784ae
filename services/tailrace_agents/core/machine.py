"""The episode machine: it plays environments, agent loops and workflows, by tokens or by text.

It owns the budget, the drain, the deadline and the outcome of an episode.

Invariants: the played code can end its own episode only; no call may sample more than the rest of the
budget at its start (parallel calls do not wait for each other, so together they may exceed it); the
deadline counts even if a loop swallows its cancellation; a fatal error overrules what a loop returns.
"""

import asyncio
import math
from collections import defaultdict
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import msgspec

from tailrace.channel.generation import Generation
from tailrace.clock import Clock
from tailrace.foreign import ForeignCodeError, place_of
from tailrace.policy.activity import Stages
from tailrace.sdk.agent_loop import EpisodeEnd, EpisodeOverError, LoopLimits, Remaining
from tailrace.sdk.policy import GenerationFailedError, Policy, PromptTooLongError, TurnRequest
from tailrace.tools.episode_tools import SchemaMismatchError, ToolsMissingError
from tailrace_agents.core.episode import (
    EpisodeHandedBackError,
    EpisodeInfraError,
    EpisodeResult,
    FatalErrorLatch,
    SamplingPlan,
    mix_seed,
)
from tailrace_agents.core.transcript import NO_TURNS, Transcript
from tailrace_agents.ports import EpisodeJournal, EpisodeTakenError
from tailrace_protos.episode import OVER_BUDGET, EpisodeTask, Outcome, StageSeconds
from tailrace_protos.generation import SamplingParams
from tailrace_protos.subjects import Phase

_SUCCESS = "success"
_ROUNDING = 1e-6


class EpisodePlayer(Protocol):
    """Plays the tasks of one tag.

    Raises `EpisodeHandedBackError` and `EpisodeTakenError`; all other endings are outcomes.
    """

    is_stoppable: bool
    """Whether cancelling `play` is how an episode stops that was settled elsewhere. False: it sees
    that by itself."""

    async def play(self, task: EpisodeTask, journal: EpisodeJournal) -> EpisodeResult:
        """Plays one episode to its end."""


class PhaseArgs(NamedTuple):
    """Sampling of the episodes of a phase."""

    sampling: SamplingParams
    max_new_tokens: int  # of one episode


@dataclass(frozen=True)
class PlayContext:
    """Context that the players of a worker share."""

    phases: Mapping[Phase, PhaseArgs]
    max_episode_tokens: int
    clock: Clock
    stages: Stages
    is_draining: Callable[[], bool]
    greedy_baseline: bool = False
    seeded_rollouts: bool = False
    evaluations: Mapping[str, PhaseArgs] = field(default_factory=dict)  # by name, with own sampling

    def phase_args(self, task: EpisodeTask) -> PhaseArgs:
        """Sampling of a task's phase, or of its named evaluation."""
        return self.evaluations.get(task.task.evaluation) or self.phases[task.phase]

    def sampling(self, task: EpisodeTask) -> SamplingPlan:
        """Parameters of every turn; turns of evaluations, and of training if asked for, have seeds."""
        params = self.phase_args(task).sampling
        if task.task.greedy or is_baseline(task, self.greedy_baseline):
            return SamplingPlan(msgspec.structs.replace(params, temperature=0.0))
        if task.phase == "train":
            if not self.seeded_rollouts:
                return SamplingPlan(params)
            return SamplingPlan(params, mix_seed(task.task.seed, task.task.ordinal, task.member))
        return SamplingPlan(params, mix_seed(task.task.seed, task.member))

    def wall_clock_s(self, task: EpisodeTask) -> float:
        """Seconds until the task's deadline."""
        return task.deadline_unix_s - self.clock.unix_s()


def is_baseline(task: EpisodeTask, greedy_baseline: bool) -> bool:
    """True for the greedy episode of a training group, its first member."""
    return greedy_baseline and task.phase == "train" and task.member == 0


class Episode:
    """One episode in play. `limits`: sampled tokens and time are set from the task."""

    __slots__ = (
        "_started_s",
        "context",
        "counts",
        "decode_s",
        "latch",
        "limits",
        "num_calls",
        "num_replayed",
        "num_restarts",
        "over",
        "prefill_s",
        "row",
        "sampling",
        "task",
        "transcript",
    )

    def __init__(
        self,
        task: EpisodeTask,
        context: PlayContext,
        limits: LoopLimits,
        row: dict[str, Any] | None = None,
    ) -> None:
        self.task = task
        self.context = context
        self.limits = limits._replace(
            max_new_tokens=context.phase_args(task).max_new_tokens,
            wall_clock_s=context.wall_clock_s(task),
        )
        self.sampling = context.sampling(task)
        self.transcript: Transcript = NO_TURNS  # policies set their own
        self.latch = FatalErrorLatch()
        self.row = row or {}
        self.over: EpisodeOverError | None = None  # the limit that refused a call
        self.num_calls = 0
        self.num_replayed = 0
        self.num_restarts = 0
        # Metrics that grow while the episode is played.
        self.counts: defaultdict[str, float] = defaultdict(float)
        self.prefill_s = self.decode_s = 0.0  # of all calls that were sampled
        self._started_s = context.clock.monotonic_s()

    def restart(self) -> None:
        """Begins again, for a new policy with a new transcript; the deadline stays."""
        self.num_calls = 0
        self.num_replayed = 0
        self.num_restarts += 1
        self.counts.clear()

    def next_call(self) -> int:
        """Numbers a new model call, recorded or not."""
        call = self.num_calls
        self.num_calls += 1
        return call

    async def sample(self, policy: Policy, request: TurnRequest) -> Generation:
        """Samples a call and counts its seconds, before its first token and after it.

        Raises `EpisodeOverError` if the engine has no room for a reply.
        """
        monotonic_s = self.context.clock.monotonic_s
        begun_s = monotonic_s()
        try:
            generation = await policy.generate(request)
        except PromptTooLongError as error:
            raise self._over("engine_length", error.reason) from error
        ended_s = monotonic_s()
        first_s = generation.first_token_at_s
        if not begun_s <= first_s <= ended_s:
            first_s = ended_s
        self.prefill_s += first_s - begun_s
        self.decode_s += ended_s - first_s
        return generation

    def remaining(self, tool_s: float) -> Remaining:
        """Rest of the limits, after `tool_s` seconds of tools."""
        limits = self.limits
        return Remaining(
            turns=limits.max_turns - self.num_calls,
            new_tokens=limits.max_new_tokens - self.transcript.num_sampled,
            wall_clock_s=limits.wall_clock_s - (self.context.clock.monotonic_s() - self._started_s),
            tool_s=limits.max_tool_s - tool_s,
        )

    def require_running(self) -> None:
        """Raises `EpisodeHandedBackError` if the worker drains."""
        if self.context.is_draining():
            raise EpisodeHandedBackError

    def budget(self, num_prompt: int, call: int, max_new_tokens: int | None = None) -> int:
        """Tokens that a call may sample; raises `EpisodeOverError` and `EpisodeHandedBackError`, and
        `ValueError` for a limit of the call that permits no token."""
        if max_new_tokens is not None and max_new_tokens < 1:
            raise ValueError(f"max_new_tokens is {max_new_tokens}: a call samples at least one token")
        if self.context.is_draining():
            raise EpisodeHandedBackError
        limits, num_sampled = self.limits, self.transcript.num_sampled
        if call >= limits.max_turns:
            raise self._over("max_turns", f"{call} model calls were made")
        if num_sampled >= limits.max_new_tokens:
            raise self._over("max_new_tokens", f"{num_sampled} tokens were sampled")
        if num_prompt >= limits.max_episode_tokens:
            raise self._over("max_episode_tokens", f"the next prompt has {num_prompt} tokens")
        left = min(limits.max_new_tokens - num_sampled, limits.max_episode_tokens - num_prompt)
        if limits.max_tokens_per_step:
            left = min(left, limits.max_tokens_per_step)
        return left if max_new_tokens is None else min(left, max_new_tokens)

    def _over(self, limit: str, reason: str) -> EpisodeOverError:
        """Keeps the error of a used-up limit: the played code may hide it behind its own."""
        self.over = EpisodeOverError(limit, reason)
        return self.over

    async def play(self, run: Callable[[], Awaitable[EpisodeEnd]]) -> EpisodeResult:
        """Runs the episode within its deadline; turns every failure into an outcome.

        Raises `EpisodeHandedBackError` and `EpisodeTakenError` only. Later calls are refused.
        """
        try:
            return await self._play(run)
        finally:
            self.latch.end()

    async def _play(self, run: Callable[[], Awaitable[EpisodeEnd]]) -> EpisodeResult:
        deadline = asyncio.timeout(self.limits.wall_clock_s)
        end = EpisodeEnd()
        try:
            async with deadline:
                end = await self._run(run)
        except TimeoutError:
            if not deadline.expired():
                raise
        except (ForeignCodeError, EpisodeOverError) as error:
            end = self._failed(error)
        except (ToolsMissingError, SchemaMismatchError) as error:
            end = EpisodeEnd(Outcome.INFRA_FAILURE, str(error))
        except (
            GenerationFailedError,
            EpisodeInfraError,
            EpisodeTakenError,
            EpisodeHandedBackError,
        ) as error:
            self.latch.error = self.latch.error or error
        return self._result(self._judged(end, deadline.expired()))

    async def _run(self, run: Callable[[], Awaitable[EpisodeEnd]]) -> EpisodeEnd:
        """Runs the played code, which can neither end this process nor cancel this task."""
        try:
            return await run()
        except SystemExit as error:
            reason = f"the played code tried to end its process: {error!r}{place_of(error)}"
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            reason = f"the played code cancelled itself{place_of(error)}"
        return EpisodeEnd(Outcome.INFRA_FAILURE, self._at(reason))

    def _failed(self, error: ForeignCodeError | EpisodeOverError) -> EpisodeEnd:
        """Judges an exception of the played code, if no fatal error is behind it.

        The episode knows whether the policy caused it, whatever a framework made of the exception.
        """
        over = error if isinstance(error, EpisodeOverError) else self.over
        if over is not None:
            if not self.transcript.num_turns:
                return EpisodeEnd(Outcome.INFRA_FAILURE, f"before the first model call: {over}")
            return EpisodeEnd(Outcome.POLICY_FAILURE, str(over), {OVER_BUDGET: 1.0})
        reason = self._at(error)
        if isinstance(error, ForeignCodeError):
            reason += place_of(error.error)
        if faults := self.transcript.faults:
            return EpisodeEnd(Outcome.POLICY_FAILURE, f"{', '.join(faults)}: {reason}")
        return EpisodeEnd(Outcome.INFRA_FAILURE, reason)

    def _judged(self, end: EpisodeEnd, is_late: bool) -> EpisodeEnd:
        """Lets fatal errors, the deadline and a missing model call overrule the end."""
        num_turns, error = self.transcript.num_turns, self.latch.error
        if isinstance(error, EpisodeTakenError | EpisodeHandedBackError):
            raise error
        if error is not None:
            end = end._replace(outcome=Outcome.INFRA_FAILURE, reason=self._at(error))
        if is_late:
            reason = (
                f"the deadline passed after {num_turns} turns" if num_turns else "the deadline passed"
            )
            return end._replace(outcome=Outcome.TIMEOUT, reason=reason)
        if end.outcome is Outcome.OK and not num_turns:
            reason = "the episode ended without a model call: nothing can be learnt from it"
            return end._replace(outcome=Outcome.INFRA_FAILURE, reason=reason)
        return end

    def _at(self, error: Exception | str) -> str:
        """Text of an error with its place in the episode."""
        num_turns = self.transcript.num_turns
        return f"turn {num_turns}: {error}" if num_turns else str(error)

    def _result(self, end: EpisodeEnd) -> EpisodeResult:
        metrics = {**self.transcript.counts(), **self.counts, **end.metrics}
        if problem := _problem_of(metrics):
            reason = "; ".join(filter(None, (end.reason, problem)))
            end = end._replace(outcome=Outcome.INFRA_FAILURE, reason=reason)
            metrics = {name: value for name, value in metrics.items() if _is_possible(name, value)}
        return EpisodeResult(
            end.outcome,
            end.reason,
            self.transcript,
            self.transcript.messages(),
            metrics,
            self.row,
            self.num_replayed,
            self.num_restarts,
            self.task.deadline_unix_s,
            StageSeconds(self.prefill_s, self.decode_s) if self.num_calls else StageSeconds(),
        )


def _is_possible(name: str, value: float) -> bool:
    """True for a finite number, and for a success between 0 and 1, apart from roundings."""
    return math.isfinite(value) and (name != _SUCCESS or abs(value - 0.5) <= 0.5 + _ROUNDING)


def _problem_of(metrics: Mapping[str, float]) -> str:
    """Text on metrics that no mean can take; empty without one."""
    wrong = {name: value for name, value in metrics.items() if not _is_possible(name, value)}
    found = ", ".join(f"{name} is {value}" for name, value in wrong.items())
    rule = "metrics must be finite" if not all(map(math.isfinite, wrong.values())) else ""
    rule = rule or "success must be a number from 0 to 1"
    return f"{rule}: {found}" if wrong else ""
