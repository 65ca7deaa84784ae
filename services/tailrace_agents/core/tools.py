"""Tools of a loop's episode: limits, journal and outcome around the tools' session.

Invariants: a cut result has a mark that the model sees, and is counted; a call whose result is in the
journal is not run again, except to restore the state of a stateful tool before it is called anew; time
counts while at least one tool is at work.
"""

import asyncio
from collections import defaultdict
from collections.abc import Sequence

import msgspec

from tailrace.tools.episode_tools import EpisodeTools
from tailrace.tracing import span
from tailrace_agents.core.environments import SUCCESS
from tailrace_agents.core.episode import ToolInfraError
from tailrace_agents.core.journal import EpisodeRecords
from tailrace_agents.core.machine import Episode
from tailrace_agents.ports import LoopObserver
from tailrace_protos.chat import ToolCall, ToolSchema
from tailrace_protos.journal import ToolRecord
from tailrace_protos.tool import ToolErrorKind, ToolResult


class BoundTools:
    """`LoopTools` of one episode."""

    def __init__(
        self,
        session: EpisodeTools,
        schemas: Sequence[ToolSchema],
        records: EpisodeRecords,
        episode: Episode,
        observer: LoopObserver | None = None,
    ) -> None:
        self.schemas = tuple(schemas)
        self._session = session
        self._records = records
        self._episode = episode
        self._limits = episode.limits
        self._counts = episode.counts
        self._clock = episode.context.clock
        self._stages = episode.context.stages
        self._observer = observer
        self._num_running = 0
        self._running_since_s = 0.0
        self._spent_s = 0.0
        self._to_repeat: defaultdict[str, list[ToolRecord]] = defaultdict(list)
        self._repeating = asyncio.Lock()

    @property
    def spent_s(self) -> float:
        """Seconds in which a tool was at work, up to now."""
        running = self._clock.monotonic_s() - self._running_since_s if self._num_running else 0.0
        return self._spent_s + running

    async def call(self, call: ToolCall, timeout_s: float | None = None) -> ToolResult:
        """See `LoopTools`; raises `ToolInfraError` and `EpisodeTakenError`."""
        with self._episode.latch:
            known = self._records.known_result(call)
            if known is None:
                result = await self._run(call, timeout_s)
            else:
                result = known.result
                if known.is_stateful:
                    self._to_repeat[call.name].append(known)
        self._counts["num_tool_errors"] += result.is_error
        for name, value in result.metrics.items():  # sums; but the newest success of a task counts
            self._counts[name] = value + (0.0 if name == SUCCESS else self._counts[name])
        if self._observer is not None:
            self._observer.on_tool(call, result, known is not None)
        return result

    async def _run(self, call: ToolCall, timeout_s: float | None) -> ToolResult:
        if refusal := self._refusal(call):
            return refusal
        async with self._repeating:  # parallel calls wait, too, until the state is restored
            await self._repeat(call.name)
        result = self._cut(await self._timed(call, timeout_s))
        if result.infra_error:
            raise ToolInfraError(call.name, result.infra_error)
        await self._records.keep_result(call, result, self._session.is_stateful(call.name))
        return result

    async def _repeat(self, name: str) -> None:
        """Restores the state of a stateful tool after a restart: repeats its recorded calls."""
        for record in sorted(self._to_repeat.pop(name, ()), key=lambda one: one.index):
            again = self._cut(await self._timed(record.call, None))
            if again.infra_error:
                raise ToolInfraError(name, again.infra_error)
            self._counts["num_repeated_tool_calls"] += 1
            self._counts["num_repeated_otherwise"] += again.content != record.result.content

    def _refusal(self, call: ToolCall) -> ToolResult | None:
        """Returns the result that the model reads if the call is not made at all."""
        if self.spent_s >= self._limits.max_tool_s:
            reason = (
                f"the time for tools ({self._limits.max_tool_s:g} s) is used up: answer without them"
            )
            return ToolResult(
                call.id, call.name, reason, is_error=True, error_kind=ToolErrorKind.TIMEOUT
            )
        return None

    async def _timed(self, call: ToolCall, timeout_s: float | None) -> ToolResult:
        left_s = self._limits.max_tool_s - self.spent_s
        bounds = (self._limits.tool_timeout_s, left_s, *(() if timeout_s is None else (timeout_s,)))
        if not self._num_running:
            self._running_since_s = self._clock.monotonic_s()
        self._num_running += 1
        self._stages.num_in_tools += 1
        try:
            with span(f"tool {call.name}", tool=call.name, arguments=call.arguments) as made:
                result = await self._session.call(call, timeout_s=min(bounds))
                made.set(result=result.content, is_error=result.is_error)
                return result
        finally:
            self._stages.num_in_tools -= 1
            if self._num_running == 1:
                self._spent_s = self.spent_s
            self._num_running -= 1

    def _cut(self, result: ToolResult) -> ToolResult:
        bound = self._limits.max_tool_output_chars
        too_many = len(result.content) - bound
        if not bound or too_many <= 0:
            return result
        self._counts["num_cut_tool_outputs"] += 1
        head, tail = bound - bound // 2, bound // 2
        content = (
            f"{result.content[:head]}\n[... {too_many} characters are left out here ...]\n"
            f"{result.content[len(result.content) - tail :]}"
        )
        return msgspec.structs.replace(result, content=content)


class NoTools:
    """`LoopTools` of an environment's episode: there are none."""

    schemas: tuple[ToolSchema, ...] = ()
    spent_s = 0.0

    async def call(self, call: ToolCall, timeout_s: float | None = None) -> ToolResult:
        """Raises `ToolInfraError`."""
        raise ToolInfraError(call.name, "an environment's episode has no tools")


NO_TOOLS = NoTools()
