"""Offers of episodes to agents outside of the cluster, in Redis; one look serves all that wait."""

import asyncio
from collections import Counter
from collections.abc import Callable

from tailrace.log import get_logger
from tailrace.store import OutsideEpisodes, StoreError
from tailrace.store.sessions import OutsideProgress
from tailrace_protos.episode import Outcome
from tailrace_protos.session import OutsideOffer, OutsideResult

log = get_logger(__name__)

_LOOK_INTERVAL_S = 0.1
_WATCH_INTERVAL_S = 0.5
_Ended = asyncio.Future[OutsideResult | None]


class StoredDesk:
    """`OutsideDesk` over Redis, once it is connected."""

    def __init__(self) -> None:
        self._connected: OutsideEpisodes | None = None
        self._waiting: dict[str, _Ended] = {}
        self._num_waiters: Counter[str] = Counter()  # a repeated attempt waits beside the first one
        self._started: dict[str, float] = {}  # first leases
        self._looking: asyncio.Task[None] | None = None

    @property
    def _episodes(self) -> OutsideEpisodes:
        assert self._connected is not None
        return self._connected

    async def start(self) -> None:
        """Start nothing: the first offer starts the looking."""

    def connect(self, episodes: OutsideEpisodes) -> None:
        """Use this run's Redis."""
        self._connected = episodes

    async def close(self) -> None:
        """Stop looking; offers stay."""
        if self._looking is not None:
            self._looking.cancel()

    async def offer(self, offer: OutsideOffer) -> bool:
        """See `OutsideDesk`."""
        return await self._episodes.offer(offer) == "leased"

    async def result_of(
        self, episode_id: str, watch: Callable[[float | None], None]
    ) -> tuple[float, OutsideResult | None]:
        """See `OutsideDesk`."""
        new: _Ended = asyncio.get_running_loop().create_future()
        found = self._waiting.setdefault(episode_id, new)
        self._num_waiters[episode_id] += 1
        try:
            while not found.done():
                watch(self._started.get(episode_id))
                if self._looking is None or self._looking.done():
                    self._looking = asyncio.create_task(self._look())
                await asyncio.wait({found}, timeout=_WATCH_INTERVAL_S)
            return self._started.get(episode_id, 0.0), found.result()
        finally:
            self._num_waiters[episode_id] -= 1
            if not self._num_waiters[episode_id]:
                del self._num_waiters[episode_id], self._waiting[episode_id]
                self._started.pop(episode_id, None)

    async def end(self, episode_id: str, outcome: Outcome) -> None:
        """See `OutsideDesk`."""
        await self._episodes.close(episode_id, outcome.value)

    async def give_up(self, episode_id: str, outcome: Outcome) -> OutsideResult | None:
        """See `OutsideDesk`."""
        return await self._episodes.give_up(episode_id, outcome.value)

    async def _look(self) -> None:
        """Look for leases and results while episodes wait."""
        while self._waiting:
            try:
                for episode_id, progress in (await self._episodes.progress([*self._waiting])).items():
                    self._take(episode_id, progress)
            except StoreError as error:
                log.warning("results of outside agents cannot be read", reason=str(error))
            await asyncio.sleep(_LOOK_INTERVAL_S)

    def _take(self, episode_id: str, progress: OutsideProgress) -> None:
        waiting = self._waiting.get(episode_id)
        if waiting is None or waiting.done():
            return
        if progress.started_unix_s is not None:
            self._started[episode_id] = progress.started_unix_s
        if progress.result is not None or progress.is_settled:
            waiting.set_result(progress.result)
