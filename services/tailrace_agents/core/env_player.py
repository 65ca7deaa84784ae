"""The player of an environment: takes one from the pool, plays, puts it back."""

from __future__ import annotations

from collections.abc import Callable

from tailrace.foreign import ForeignCodeError
from tailrace.log import get_logger
from tailrace_agents.core.environments import EnvHandle, EnvPool
from tailrace_agents.core.episode import EpisodeLimits, EpisodeResult
from tailrace_agents.core.play import play_episode
from tailrace_agents.core.players import PlayContext
from tailrace_agents.core.tokens import EpisodeTokens
from tailrace_agents.ports import EpisodeJournal, MakeRecorder, no_recorder
from tailrace_protos.episode import EpisodeTask, Outcome

log = get_logger(__name__)


class EnvPlayer:
    """`EpisodePlayer` of one entry of `custom_envs`."""

    def __init__(
        self,
        pool: EnvPool,
        context: PlayContext,
        max_tokens_per_step: int,
        make_recorder: MakeRecorder = no_recorder,
        make_tokens: Callable[[], EpisodeTokens] = EpisodeTokens,
    ) -> None:
        self._make_tokens = make_tokens
        self._pool = pool
        self._context = context
        self._max_tokens_per_step = max_tokens_per_step
        self._make_recorder = make_recorder

    async def play(self, task: EpisodeTask, journal: EpisodeJournal) -> EpisodeResult:
        """See `EpisodePlayer`."""
        try:
            handle = self._pool.take()
        except ForeignCodeError as error:
            return EpisodeResult(Outcome.INFRA_FAILURE, str(error))
        context = self._context
        recorder = self._make_recorder(handle.env, task)
        clean = False
        try:
            result = await play_episode(
                handle,
                context.renderer,
                context.policy,
                self._limits(task),
                context.sampling(task),
                seed=task.task.seed,
                episode_id=task.episode_id,
                journal=journal,
                observer=recorder,
                is_draining=context.is_draining,
                make_tokens=self._make_tokens,
            )
            clean = result.outcome.is_valid
        finally:
            self._put_away(handle, clean)
        if recorder is not None:
            await recorder.save()
        return result

    def _limits(self, task: EpisodeTask) -> EpisodeLimits:
        context = self._context
        return EpisodeLimits(
            context.max_episode_tokens,
            context.phases[task.phase].max_new_tokens,
            self._max_tokens_per_step,
            context.wall_clock_s(task),
        )

    def _put_away(self, handle: EnvHandle, clean: bool) -> None:
        if clean:
            self._pool.give_back(handle)
            return
        try:
            handle.close()
        except ForeignCodeError as error:
            log.warning("environment does not close", reason=str(error))
