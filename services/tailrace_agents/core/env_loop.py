"""Environments as agent loops: reset, then reply and step until the environment is over."""

from collections.abc import Awaitable, MutableMapping
from typing import Any, cast

from tailrace.foreign import ForeignCodeError
from tailrace.log import get_logger
from tailrace.sdk.agent_loop import (
    AgentLoop,
    EpisodeEnd,
    EpisodeOverError,
    EpisodePolicy,
    LoopLimits,
)
from tailrace_agents.core.environments import SUCCESS, EnvHandle, EnvPool, StepResult
from tailrace_agents.core.episode import EpisodeResult
from tailrace_agents.core.journal import EpisodeRecords
from tailrace_agents.core.machine import Episode, PlayContext
from tailrace_agents.core.model import EnvPolicy, EnvView, EpisodeModel, ReplayMismatchError
from tailrace_agents.ports import EnvObserver, EpisodeJournal, MakeObserver, no_observer
from tailrace_protos.episode import EpisodeTask, Outcome

log = get_logger(__name__)


class EnvLoop(AgentLoop):
    """Plays one episode of an environment. `counts` grows by its invalid actions.

    An episode that a limit cuts has the success that its environment told last, 0 if it tells it at the
    end only. Where the environment never tells a success, none is reported.
    """

    def __init__(
        self,
        handle: EnvHandle,
        seed: int,
        counts: MutableMapping[str, float],
        observer: EnvObserver | None = None,
    ) -> None:
        self._handle = handle
        self._seed = seed
        self._counts = counts
        self._observer = observer
        self._success = 0.0  # that the environment has told last

    async def run(self, row: dict[str, Any], policy: EpisodePolicy) -> EpisodeEnd:
        """See `AgentLoop`; raises `ForeignCodeError` and `ReplayMismatchError`."""
        # `play_environment` gives one; isinstance of a Protocol is slow.
        turns = cast(EnvPolicy, policy)
        self._success = 0.0  # an episode that begins again has told none
        observation, opening = await self._handle.reset(self._seed)
        if self._observer is not None:
            self._observer.on_reset(observation)
        while True:
            try:
                reply = await turns.answer(observation, opening)
            except EpisodeOverError:
                if self._handle.reports_success:
                    self._counts[SUCCESS] = self._success
                raise
            step = await self._handle.step(reply)
            self._note(reply, step)
            await turns.take_step(step)
            if step.terminated or step.truncated:
                return EpisodeEnd(metrics=step.numbers)
            observation = step.observation

    def _note(self, reply: str, step: StepResult) -> None:
        self._success = step.numbers.get(SUCCESS, self._success)
        if "invalid_action" in step.numbers:
            self._counts["num_invalid_actions"] += step.numbers.pop("invalid_action")
        if self._observer is not None:
            done = step.terminated or step.truncated
            self._observer.on_turn(reply, step.observation, step.reward, done)


def play_environment(
    handle: EnvHandle,
    episode: Episode,
    model: EpisodeModel,
    view: EnvView,
    journal: EpisodeJournal,
    observer: EnvObserver | None = None,
) -> Awaitable[EpisodeResult]:
    """Plays the episode that the task's seed fixes; a replay that does not fit starts it again."""
    loop = EnvLoop(handle, episode.task.task.seed, episode.counts, observer)

    async def run() -> EpisodeEnd:
        records = EpisodeRecords(journal, await journal.load())
        try:
            return await loop.run({}, model.env_policy(episode, view, records))
        except ReplayMismatchError:
            await journal.clear()
            episode.restart()
            return await loop.run({}, model.env_policy(episode, view, EpisodeRecords(journal)))

    return episode.play(run)


class EnvPlayer:
    """`EpisodePlayer` of one entry of `custom_envs`: takes an environment from the pool."""

    is_stoppable = True

    def __init__(
        self,
        pool: EnvPool,
        context: PlayContext,
        model: EpisodeModel,
        limits: LoopLimits,
        view: EnvView,
        make_observer: MakeObserver = no_observer,
    ) -> None:
        self._pool = pool
        self._context = context
        self._model = model
        self._limits = limits
        self._view = view
        self._make_observer = make_observer

    async def play(self, task: EpisodeTask, journal: EpisodeJournal) -> EpisodeResult:
        """See `EpisodePlayer`."""
        try:
            handle = self._pool.take()
        except ForeignCodeError as error:
            return EpisodeResult(Outcome.INFRA_FAILURE, str(error))
        observer = self._make_observer(handle.env, task)
        episode = Episode(task, self._context, self._limits)
        clean = False
        try:
            result = await play_environment(handle, episode, self._model, self._view, journal, observer)
            clean = result.outcome.is_valid
        finally:
            self._put_away(handle, clean)
        if observer is not None:
            await observer.save()
        return result

    def _put_away(self, handle: EnvHandle, clean: bool) -> None:
        try:
            if clean:
                self._pool.give_back(handle)
            else:
                handle.close()
        except ForeignCodeError as error:
            log.warning("environment does not close", reason=str(error))
