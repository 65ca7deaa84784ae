"""Scores as weighted sums of components.

Invariants: a score depends on its item alone, whatever happens to others of its request; a component
that fails leaves the whole score without a reward, never with a smaller one; the same item asked twice
at once is computed once.
"""

import asyncio
import hashlib
import math
from collections import OrderedDict
from collections.abc import Mapping, Sequence

from tailrace.foreign import ForeignCodeError, foreign_code
from tailrace.log import get_logger
from tailrace_protos.base import encode
from tailrace_protos.generation import CallError, CallErrorCode
from tailrace_protos.reward import Score, ScoreItem
from tailrace_reward.config import RewardEntry
from tailrace_reward.ports import Component, ComponentFailedError

log = get_logger(__name__)

_MAX_REMEMBERED = 8192


class Scorer:
    """Scores items by the components of the configuration.

    Requests are repeated when an answer takes long; scores that had to be asked for are therefore
    remembered (the newest 8,192, also those still being computed). Failures are not: what is asked for
    again after one may find a judge that has come back.
    """

    def __init__(
        self, entries: Sequence[RewardEntry], components: Mapping[str, Component] | None = None
    ) -> None:
        self._entries = tuple(entries)
        self._components = components or {}  # by name: all but the environment's return
        self._remembered: OrderedDict[bytes, asyncio.Task[Score]] = OrderedDict()

    async def score(self, items: Sequence[ScoreItem]) -> tuple[Score, ...]:
        """Scores in the order of the items."""
        if not self._components:
            return tuple([await self._score(item) for item in items])
        tasks = [self._once(item) for item in items]
        # shielded: two requests may wait for one task, and one of them may be cancelled
        return tuple(await asyncio.gather(*map(asyncio.shield, tasks)))

    def _once(self, item: ScoreItem) -> asyncio.Task[Score]:
        key = hashlib.blake2b(encode(item), digest_size=16).digest()
        task = self._remembered.get(key)
        if task is None or _is_void(task):
            task = self._remembered[key] = asyncio.create_task(self._score(item))
            if len(self._remembered) > _MAX_REMEMBERED:
                self._remembered.popitem(last=False)
        return task

    async def _score(self, item: ScoreItem) -> Score:
        components: dict[str, float] = {}
        try:
            for entry in self._entries:
                components[entry.name] = await self._component(entry, item)
        except (ComponentFailedError, ForeignCodeError) as error:
            return Score(item.episode_id, error=CallError(CallErrorCode.INTERNAL, _reason(error)))
        reward = sum(entry.weight * components[entry.name] for entry in self._entries)
        if not math.isfinite(reward):
            reason = f"the weighted sum of {components} is {reward}: lower reward.rewards[].weight"
            return Score(item.episode_id, error=CallError(CallErrorCode.INTERNAL, reason))
        return Score(item.episode_id, reward, components)

    async def _component(self, entry: RewardEntry, item: ScoreItem) -> float:
        if entry.kind == "env_return":
            return _sum(entry.name, item.turn_rewards)
        with foreign_code(f"reward {entry.name!r}"):
            value = await self._components[entry.name].score(item)
        if not math.isfinite(value):
            raise ComponentFailedError(entry.name, f"returned {value}")
        return value


def _reason(error: ComponentFailedError | ForeignCodeError) -> str:
    """Reason of a failure; an error that is not a component's own answer is logged too."""
    if not isinstance(error, ForeignCodeError):
        return str(error)
    if isinstance(error.error, ComponentFailedError):
        return str(error.error)
    log.error("reward component failed", reason=str(error), exc_info=error.error)
    return str(error)


def _sum(name: str, turn_rewards: Sequence[float]) -> float:
    try:
        return math.fsum(turn_rewards)
    except (OverflowError, ValueError) as error:
        raise ComponentFailedError(
            name, f"the sum of the turns' rewards is not finite: {error}"
        ) from error


def _is_void(task: asyncio.Task[Score]) -> bool:
    """Tell whether it has ended without a score."""
    return task.done() and (
        task.cancelled() or bool(task.exception()) or task.result().error is not None
    )
