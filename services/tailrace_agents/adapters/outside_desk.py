"""Offers of episodes to agents outside of the cluster, in Redis; one look serves all that wait."""

import asyncio
from collections.abc import Callable

from tailrace.log import get_logger
from tailrace.store import OutsideEpisodes, StoreError
from tailrace_protos.episode import Outcome
from tailrace_protos.session import OutsideOffer, OutsideResult

log = get_logger(__name__)

_LOOK_INTERVAL_S = 0.1


class StoredDesk:
    """`OutsideDesk` over Redis."""

    def __init__(self, episodes: OutsideEpisodes) -> None:
        self._episodes = episodes
        self._waiting: dict[str, asyncio.Future[OutsideResult]] = {}
        self._looking: asyncio.Task[None] | None = None

    async def result_of(
        self, offer: OutsideOffer, require_running: Callable[[], None]
    ) -> OutsideResult:
        """See `OutsideDesk`."""
        episode_id = offer.opening.episode_id
        await self._episodes.offer(offer)
        found: asyncio.Future[OutsideResult] = asyncio.get_running_loop().create_future()
        self._waiting[episode_id] = found
        if self._looking is None or self._looking.done():
            self._looking = asyncio.create_task(self._look())
        try:
            while not found.done():
                require_running()
                await asyncio.wait({found}, timeout=1.0)
            return found.result()
        finally:
            del self._waiting[episode_id]

    async def close(self, episode_id: str, outcome: Outcome) -> None:
        """See `OutsideDesk`."""
        await self._episodes.close(episode_id, outcome.value)

    async def _look(self) -> None:
        """Look for results while episodes wait."""
        while self._waiting:
            try:
                results = await self._episodes.results(list(self._waiting))
            except StoreError as error:
                log.warning("results of outside agents cannot be read", reason=str(error))
                results = {}
            for episode_id, result in results.items():
                waiting = self._waiting.get(episode_id)
                if waiting is not None and not waiting.done():
                    waiting.set_result(result)
            await asyncio.sleep(_LOOK_INTERVAL_S)
