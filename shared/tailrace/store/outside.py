"""Episodes that agents outside of the cluster play: offered by a worker, leased and rewarded over HTTP.

Invariants: an episode has one holder at a time; the first result counts, and a repeated one is
recognised by its digest; every operation may be repeated; the state survives each process.
"""

import hashlib
import time
from typing import Any, NamedTuple

from tailrace.store import scripts
from tailrace.store.connection import StoreConnection
from tailrace_protos.base import decode, encode
from tailrace_protos.session import OutsideOffer, OutsideResult
from tailrace_protos.subjects import redis_prefix

KEEP_S = 3600  # that an episode is known after its end, for late rewards
OFFER_S = 7 * 86_400  # that an offer waits for agents


class OutsideLease(NamedTuple):
    """Leased episode. `is_used`: an earlier holder had its session. `started_unix_s`: time of the first
    lease. `is_resumed`: this holder had it before."""

    offer: OutsideOffer
    is_used: bool
    started_unix_s: float
    is_resumed: bool


class OutsideProgress(NamedTuple):
    """Progress of an offered episode."""

    started_unix_s: float | None  # time of its first lease
    is_settled: bool  # its group has it, or is closed
    result: OutsideResult | None


class OutsideState(NamedTuple):
    """State of an episode: `waiting`, `leased`, `rewarded` or `over`, then with its outcome."""

    state: str
    outcome: str


class OutsideEpisodes:
    """Outside episodes of one run."""

    def __init__(self, redis: StoreConnection, run: str) -> None:
        self._pipeline = redis.pipeline
        self._prefix = redis_prefix(run)

    async def offer(self, offer: OutsideOffer) -> None:
        """Offers an episode; one that was offered before keeps its lease and its result."""
        episode_id, encoded = offer.opening.episode_id, encode(offer)
        await self._run("offer", episode_id, encoded, offer.lease_s, time.time(), OFFER_S)

    async def lease(self, holder: str) -> OutsideLease | None:
        """Leases an episode: the holder's own if it has one, else the oldest that waits."""
        found = await self._run("lease", holder, time.time())
        if not found:
            return None
        offer, used, started, resumed = found
        return OutsideLease(
            decode(offer, OutsideOffer), used is not None, float(started), bool(resumed)
        )

    async def bind(self, episode_id: str, key_hash: str) -> None:
        """Makes a key the only one that opens the episode."""
        await self._run("bind", episode_id, key_hash)

    async def id_of_key(self, key_hash: str) -> str:
        """Returns the episode that a key opens, also after its end; empty if there is none."""
        found = await self._pipeline.command("GET", f"{self._prefix}outside_key:{key_hash}")
        return "" if found is None else found.decode()

    async def renew(self, episode_id: str) -> bool:
        """Prolongs a lease; returns False if the episode is not leased."""
        return bool(await self._run("renew", episode_id, time.time()))

    async def state(self, episode_id: str) -> OutsideState | None:
        """Returns the state of an episode; None if it is unknown."""
        key = f"{self._prefix}outside:{episode_id}"
        state, outcome = await self._pipeline.command("HMGET", key, "state", "outcome")
        return None if state is None else OutsideState(state.decode(), (outcome or b"").decode())

    async def settle(self, episode_id: str, result: OutsideResult) -> str:
        """Keeps the first result; returns `taken`, `same`, `other`, `over` or `unknown`."""
        encoded = encode(result)
        digest = hashlib.blake2b(encoded, digest_size=16).hexdigest()
        settled: bytes = await self._run("settle", episode_id, encoded, digest)
        return settled.decode()

    async def progress(self, episode_ids: list[str]) -> dict[str, OutsideProgress]:
        """Returns the progress of these episodes."""
        return {
            name.decode(): OutsideProgress(
                None if started is None else float(started),
                bool(settled),
                None if result is None else decode(result, OutsideResult),
            )
            for name, started, settled, result in await self._run("progress", *episode_ids)
        }

    async def close(self, episode_id: str, outcome: str) -> None:
        """Ends an episode: no agent gets it any more."""
        await self._run("close", episode_id, outcome, KEEP_S)

    async def _run(self, operation: str, *args: bytes | str | float) -> Any:
        return await self._pipeline.script(scripts.OUTSIDE_EPISODE, self._prefix, operation, *args)
