"""Claims on retries: one replica answers a retried call, the others wait for its record.

The store holds a claim while the call runs; its holder renews it. The claim of a dead holder expires
after `_LIFETIME_S`. Calls continue without claims while the store is unavailable.
"""

import asyncio
import itertools
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from tailrace.retry import Backoff
from tailrace.store.errors import StoreError
from tailrace_gateway import metrics
from tailrace_gateway.ports import SessionStore

_LIFETIME_S = 6.0
_FIRST_LOOK_S, _LAST_LOOK_S = 0.02, 0.5


class Claims:
    """Claims of this replica."""

    def __init__(self, store: SessionStore) -> None:
        self._store = store
        self._names = map(f"{uuid.uuid4().hex}:{{}}".format, itertools.count())

    @asynccontextmanager
    async def hold(self, session_id: str, name: str) -> AsyncIterator[None]:
        """Hold the claim of a call of this name for the duration of the block; wait for it first."""
        holder = next(self._names)
        if not await self._take(session_id, name, holder):
            yield
            return
        keeping = asyncio.create_task(self._keep(session_id, name, holder))
        try:
            yield
        finally:
            keeping.cancel()
            with suppress(StoreError):  # the claim then expires
                await self._store.unclaim(session_id, name, holder)

    async def _take(self, session_id: str, name: str, holder: str) -> bool:
        """Wait for the claim; return False if the store is unavailable."""
        backoff = Backoff(_FIRST_LOOK_S, _LAST_LOOK_S)
        try:
            if await self._store.claim(session_id, name, holder, _LIFETIME_S) == holder:
                return True
            with metrics.WAITING_RETRIES.track_inprogress():
                while await self._store.claim(session_id, name, holder, _LIFETIME_S) != holder:
                    await backoff.sleep()
        except StoreError:
            return False
        return True

    async def _keep(self, session_id: str, name: str, holder: str) -> None:
        while True:
            await asyncio.sleep(_LIFETIME_S / 3)
            with suppress(StoreError):
                await self._store.claim(session_id, name, holder, _LIFETIME_S)
