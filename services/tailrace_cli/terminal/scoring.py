"""Rewards of an episode in the terminal: the reward service's own components, in this process."""

from __future__ import annotations

import asyncio
import inspect

from tailrace.dotted import load_dotted
from tailrace.foreign import ForeignCodeError, foreign_code
from tailrace_agents.core.episode import EpisodeResult
from tailrace_agents.core.settlement import score_item
from tailrace_protos.episode import EpisodeTask
from tailrace_protos.reward import Score, ScoreItem
from tailrace_reward.config import RewardConfig
from tailrace_reward.core.scoring import Scorer
from tailrace_reward.ports import FunctionFailedError


class FunctionsHere:
    """`FunctionRunner` without processes of its own: plain functions run in threads."""

    async def call(self, function: str, item: ScoreItem, timeout_s: float) -> float:
        """See `FunctionRunner`."""
        score = load_dotted(function, "reward.rewards.function")
        arguments = (item.task, item.messages, item.metrics)
        try:
            async with asyncio.timeout(timeout_s):
                with foreign_code(function):
                    if inspect.iscoroutinefunction(score):
                        return float(await score(*arguments))
                    return float(await asyncio.to_thread(score, *arguments))
        except TimeoutError as error:
            raise FunctionFailedError(function, f"took longer than {timeout_s:g} s") from error
        except ForeignCodeError as error:
            raise FunctionFailedError(function, str(error)) from error


async def score_here(config: RewardConfig, task: EpisodeTask, result: EpisodeResult) -> Score | None:
    """The score of an episode that has one."""
    if not result.outcome.is_valid:
        return None
    (score,) = await Scorer(config.rewards, FunctionsHere()).score([score_item(task, result)])
    return score
