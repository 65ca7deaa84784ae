"""Retries of one call at several replicas: one of them answers, the others wait for its record.

A claim is held in the store as long as the call runs, and kept up meanwhile; one whose holder died runs
out after a few seconds. While the store is away nobody can know of the others, and calls go on.
"""

from __future__ import annotations

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
    """The claims of this replica."""

    def __init__(self, store: SessionStore) -> None:
        self._store = store
        self._names = map(f"{uuid.uuid4().hex}:{{}}".format, itertools.count())

    @asynccontextmanager
    async def hold(self, session_id: str, name: str) -> AsyncIterator[None]:
        """Nobody else holds a call of this name in this session meanwhile; waits for that."""
        holder = next(self._names)
        if not await self._take(session_id, name, holder):
            yield
            return
        keeping = asyncio.create_task(self._keep(session_id, name, holder))
        try:
            yield
        finally:
            keeping.cancel()
            with suppress(StoreError):  # then it runs out
                await self._store.unclaim(session_id, name, holder)

    async def _take(self, session_id: str, name: str, holder: str) -> bool:
        """Wait for the claim; False while the store is away."""
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
