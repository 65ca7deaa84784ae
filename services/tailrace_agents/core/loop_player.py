"""Player of a data set: finds a task's row and runs the loop that plays it."""

import copy
import math
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from tailrace.data import Dataset, Row
from tailrace.foreign import encodable, foreign_code
from tailrace.sdk.agent_loop import AgentLoop, EpisodeEnd, EpisodePolicy
from tailrace.sdk.workflow import REAL, WorkflowReturnError, rewards_of
from tailrace.tools.episode_tools import EpisodeTools
from tailrace_agents.core.episode import EpisodeResult
from tailrace_agents.core.journal import EpisodeRecords
from tailrace_agents.core.machine import Episode, PlayContext
from tailrace_agents.core.model import EpisodeModel, LoopPlan
from tailrace_agents.core.tools import BoundTools
from tailrace_agents.ports import EpisodeJournal, LoopObserver
from tailrace_protos.episode import EpisodeTask, Outcome


class ToolSource(Protocol):
    """Source of tools: `ToolClient` in a run, `LocalTools` in a terminal."""

    def session(
        self,
        episode_id: str,
        names: Sequence[str],
        *,
        create_kwargs: Mapping[str, dict[str, Any]] | None = None,
    ) -> EpisodeTools:
        """Opens the tools of one episode."""


def row_of(dataset: Dataset, task: EpisodeTask) -> Row:
    """Returns the row of a task."""
    ordinal = task.task.ordinal
    assert ordinal >= 0, "a task of a data set without a place in its order"
    return dataset.eval_row(ordinal) if task.phase == "eval" else dataset.train_row(ordinal)


async def play_row(
    loop_class: type[AgentLoop],
    episode: Episode,
    model: EpisodeModel,
    plan: LoopPlan,
    tools: EpisodeTools,
    journal: EpisodeJournal,
    observer: LoopObserver | None = None,
) -> EpisodeResult:
    """Plays the episode's row with a loop; tools are released before the episode ends."""

    async def run() -> EpisodeEnd:
        records = EpisodeRecords(journal, await journal.load())
        async with tools:
            bound = BoundTools(tools, await tools.schemas(), records, episode, observer)
            policy = model.loop_policy(episode, plan, records, bound, observer)
            with foreign_code(f"agent loop {loop_class.__name__}"):
                made = await loop_class().run(copy.deepcopy(episode.row), policy)
                return _end_of(made, policy, loop_class.__name__)

    return await episode.play(run)


def _end_of(made: object, policy: EpisodePolicy, name: str) -> EpisodeEnd:
    """Reads the value that a loop returned: an end, a reward, rewards by completion id, or None."""
    if isinstance(made, EpisodeEnd):
        return _checked(made, f"{name}.run")
    if made is not None:
        rewards = rewards_of(made, f"{name}.run")
        for completion_id in rewards.keys() - {""}:
            policy.set_reward(rewards[completion_id], completion_id)
        return policy.finish(rewards.get(""))
    return policy.finish()


def _checked(end: EpisodeEnd, name: str) -> EpisodeEnd:
    """An end that a loop made, as it can be sent; raises `WorkflowReturnError`."""
    if not isinstance(end.outcome, Outcome):
        raise WorkflowReturnError(f"{name} gave the outcome {end.outcome!r}: give an `Outcome`")
    if not isinstance(end.metrics, Mapping):
        raise WorkflowReturnError(
            f"{name} gave metrics of {type(end.metrics).__name__}: give a dict of name to number"
        )
    reason = encodable("" if end.reason is None else str(end.reason))
    metrics = {encodable(str(key)): _metric(key, value, name) for key, value in end.metrics.items()}
    return EpisodeEnd(end.outcome, reason, metrics)


def _metric(key: object, value: Any, name: str) -> float:
    """A metric as a float, finite or not; raises `WorkflowReturnError`."""
    if not isinstance(value, REAL):
        raise WorkflowReturnError(
            f"{name} gave the metric {key!r} the value {type(value).__name__}: give numbers"
        )
    try:
        return float(value)
    except OverflowError:  # an integer
        return math.inf


class LoopPlayer:
    """`EpisodePlayer` of one entry of `datasets`; `loops` has the loop of every row."""

    is_stoppable = True

    def __init__(
        self,
        dataset: Dataset,
        loops: Mapping[str, type[AgentLoop]],
        plan: LoopPlan,
        context: PlayContext,
        model: EpisodeModel,
        tools: ToolSource,
        observer: LoopObserver | None = None,
    ) -> None:
        self._dataset = dataset
        self._loops = loops
        self._plan = plan
        self._context = context
        self._model = model
        self._tools = tools
        self._observer = observer

    async def play(self, task: EpisodeTask, journal: EpisodeJournal) -> EpisodeResult:
        """See `EpisodePlayer`."""
        row = row_of(self._dataset, task).data
        episode = Episode(task, self._context, self._plan.limits, row)
        tools = self._tools.session(task.episode_id, row["tools"], create_kwargs=row["tools_kwargs"])
        loop_class = self._loops[row["agent_name"]]
        return await play_row(
            loop_class, episode, self._model, self._plan, tools, journal, self._observer
        )
