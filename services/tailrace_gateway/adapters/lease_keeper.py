"""Leases of outside episodes: none runs out while a model call of its agent is in flight."""

import asyncio
import math

from tailrace.clock import Clock
from tailrace.log import get_logger
from tailrace.store import OutsideEpisodes
from tailrace.store.errors import StoreError
from tailrace_gateway.core.session import Session
from tailrace_gateway.core.sessions import Sessions

log = get_logger(__name__)

_INTERVAL_S = 0.25
_RENEWALS = 4  # in the length of a lease
_NOT_LEASED_S = 1.0  # until the next look


class LeaseKeeper:
    """Prolongs the leases of sessions with calls in flight; asks once for one without a lease."""

    def __init__(self, sessions: Sessions, episodes: OutsideEpisodes, clock: Clock) -> None:
        self._sessions = sessions
        self._episodes = episodes
        self._clock = clock

    async def run(self) -> None:
        """Prolong leases until cancelled."""
        while True:
            await asyncio.sleep(_INTERVAL_S)
            await self.renew()

    async def renew(self) -> None:
        """Prolong the leases that are due."""
        now_s = self._clock.monotonic_s()
        due = [one for one in self._sessions.busy() if one.renewal_due_s <= now_s]
        try:
            await asyncio.gather(*(self._renew(one, now_s) for one in due))
        except StoreError as error:
            log.warning("leases of agents are not prolonged", reason=str(error))

    async def _renew(self, session: Session, now_s: float) -> None:
        lease_s = await self._episodes.renew(session.session_id)
        if lease_s is None:  # no outside agent plays it
            session.renewal_due_s = math.inf
        else:
            session.renewal_due_s = now_s + (lease_s / _RENEWALS or _NOT_LEASED_S)
