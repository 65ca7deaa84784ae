"""Scores from the reward service: episodes that end within 2 ms share a request.

Scoring is idempotent, so a request without an answer is sent again, for as long as the caller waits.
"""

import asyncio
from collections.abc import Sequence

from tailrace.bus import Bus, CallFailedError, CallTimeoutError, NoResponderError, OversizedMessageError
from tailrace.policy.batching import Batcher
from tailrace.retry import Backoff
from tailrace_protos import subjects
from tailrace_protos.generation import CallError, CallErrorCode
from tailrace_protos.reward import Score, ScoreItem, ScoreReply, ScoreRequest

_DELAY_S = 0.002
_MAX_ITEMS = 256
_MAX_TEXT_CHARS = 128 * 1024  # of one request; UTF-8 has at most four bytes a character
_NUM_RETRIES = 2
_PASSING = (CallErrorCode.OVERLOADED, CallErrorCode.NOT_READY)


class RewardClient:
    """Asks the reward service of one run."""

    def __init__(self, bus: Bus, run: str, timeout_s: float) -> None:
        self._bus = bus
        self._subject = subjects.score(run)
        self._timeout_s = timeout_s
        self._batcher: Batcher[ScoreItem, Score] = Batcher(
            self._ask,
            delay_s=_DELAY_S,
            max_items=_MAX_ITEMS,
            size_of=_num_chars,
            max_size=_MAX_TEXT_CHARS,
        )

    async def score(self, item: ScoreItem) -> Score:
        """The item's score, or one with an error; waits while no reward worker can be reached."""
        backoff = Backoff(0.1, 2.0)
        while True:
            try:
                return await self._batcher.submit(item)
            except (NoResponderError, CallTimeoutError):
                await backoff.sleep()
            except CallFailedError as error:
                if error.code not in _PASSING:
                    return Score(item.episode_id, error=CallError(error.code, str(error)))
                await backoff.sleep()

    async def _ask(self, items: Sequence[ScoreItem]) -> Sequence[Score]:
        """Asks for all scores at once, or for each half, if their texts and rows are too large for one
        message."""
        try:
            reply = await self._bus.request(
                self._subject,
                ScoreRequest(tuple(items)),
                ScoreReply,
                timeout_s=self._timeout_s,
                idempotent_retries=_NUM_RETRIES,
            )
        except OversizedMessageError as error:
            if len(items) == 1:
                return [Score(items[0].episode_id, error=CallError(CallErrorCode.INVALID, str(error)))]
            middle = len(items) // 2
            halves = await asyncio.gather(self._ask(items[:middle]), self._ask(items[middle:]))
            return [*halves[0], *halves[1]]
        return reply.scores


def _num_chars(item: ScoreItem) -> int:
    return sum(len(message.content) for message in item.messages)
