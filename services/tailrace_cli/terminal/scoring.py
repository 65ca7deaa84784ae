"""Rewards of an episode in the terminal: the reward service's own components, in this process."""

from __future__ import annotations

import asyncio
import inspect

from tailrace.foreign import ForeignCodeError, foreign_code
from tailrace.import_path import load_object
from tailrace_agents.core.episode import EpisodeResult
from tailrace_agents.core.settlement import score_item
from tailrace_protos.episode import EpisodeTask
from tailrace_protos.reward import Score, ScoreItem
from tailrace_reward.adapters.components import open_components
from tailrace_reward.config import RewardConfig
from tailrace_reward.core.scoring import Scorer
from tailrace_reward.ports import ComponentFailedError


class FunctionHere:
    """`Component` of a function without a process of its own: plain functions run in threads."""

    def __init__(self, function: str, timeout_s: float) -> None:
        self._function = function
        self._timeout_s = timeout_s

    async def score(self, item: ScoreItem) -> float:
        """See `Component`."""
        function = load_object(self._function, "reward.rewards.function")
        arguments = (item.task, item.messages, item.metrics)
        try:
            async with asyncio.timeout(self._timeout_s):
                with foreign_code(self._function):
                    if inspect.iscoroutinefunction(function):
                        return float(await function(*arguments))
                    return float(await asyncio.to_thread(function, *arguments))
        except TimeoutError as error:
            reason = f"took longer than {self._timeout_s:g} s"
            raise ComponentFailedError(self._function, reason) from error
        except ForeignCodeError as error:
            raise ComponentFailedError(self._function, str(error)) from error


async def score_here(config: RewardConfig, task: EpisodeTask, result: EpisodeResult) -> Score | None:
    """The score of an episode that has one."""
    if not result.outcome.is_valid:
        return None
    components = await open_components(config, "the experiment", FunctionHere)
    try:
        (score,) = await Scorer(config.components, components.by_name).score([score_item(task, result)])
    finally:
        await components.close()
    return score
