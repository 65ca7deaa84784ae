"""The player of a data set: finds a task's row and the loop that plays it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from tailrace.data import Dataset, Row
from tailrace.sdk.agent_loop import AgentLoop
from tailrace.tools.episode_tools import EpisodeTools
from tailrace_agents.core.episode import EpisodeResult
from tailrace_agents.core.loops.observer import LoopObserver
from tailrace_agents.core.loops.play import LoopEpisode, LoopPlan
from tailrace_agents.core.players import PlayContext
from tailrace_agents.ports import EpisodeJournal
from tailrace_protos.episode import EpisodeTask


class ToolSource(Protocol):
    """Where tools come from: `ToolClient` in a run, `LocalTools` in a terminal."""

    def session(
        self,
        episode_id: str,
        names: Sequence[str],
        *,
        create_kwargs: Mapping[str, dict[str, Any]] | None = None,
    ) -> EpisodeTools:
        """The tools of one episode."""


def row_of(dataset: Dataset, task: EpisodeTask) -> Row:
    """The row that a task means."""
    ordinal = task.task.ordinal
    assert ordinal >= 0, "a task of a data set without a place in its order"
    return dataset.eval_row(ordinal) if task.phase == "eval" else dataset.train_row(ordinal)


class LoopPlayer:
    """`EpisodePlayer` of one entry of `datasets`; every row's loop is known to `loops`."""

    def __init__(
        self,
        dataset: Dataset,
        loops: Mapping[str, type[AgentLoop]],
        plan: LoopPlan,
        context: PlayContext,
        tools: ToolSource,
        observer: LoopObserver | None = None,
    ) -> None:
        self._dataset = dataset
        self._loops = loops
        self._plan = plan
        self._context = context
        self._tools = tools
        self._observer = observer

    async def play(self, task: EpisodeTask, journal: EpisodeJournal) -> EpisodeResult:
        """See `EpisodePlayer`."""
        row = row_of(self._dataset, task).data
        episode = LoopEpisode(
            self._loops[row["agent_name"]], row, task, self._plan, self._context, self._observer
        )
        tools = self._tools.session(task.episode_id, row["tools"], create_kwargs=row["tools_kwargs"])
        return await episode.play(tools, journal)
