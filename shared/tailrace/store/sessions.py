"""Gateway sessions: the record and the log of each session.

The log is append-only and holds encoded entries in the order of their capture. A replica that has read
a part of it therefore reads only later entries. An append is atomic and may be repeated; Redis refuses
appends to a session that is finished or was opened again. Keys are stored as hashes.

Agents outside of the cluster lease episodes that a worker offers. An episode has one holder at a time;
the first result counts, and a repeated one is known by its digest; every operation may be repeated.
A corrupted offer or result is an infrastructure failure of its episode.
"""

import hashlib
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from tailrace.store import scripts
from tailrace.store.connection import StoreConnection
from tailrace.store.errors import MALFORMED
from tailrace.store.quarantine import quarantine
from tailrace_protos.base import decode, encode
from tailrace_protos.episode import Outcome
from tailrace_protos.session import OpenSession, OutsideOffer, OutsideResult
from tailrace_protos.subjects import redis_prefix

CLOSED = -1


@dataclass(frozen=True, slots=True)
class StoredSession:
    """Session in Redis, with the log entries that are new to the reader."""

    is_open: bool
    encoded_record: bytes
    nonce: str  # differs between two sessions with one id
    entries: tuple[bytes, ...]
    answer: bytes | None  # the requested answer

    @property
    def record(self) -> OpenSession:
        """Decodes the record of the newest open."""
        return decode(self.encoded_record, OpenSession)


class SessionLogs:
    """Sessions of one run."""

    def __init__(self, redis: StoreConnection, run: str) -> None:
        self._redis = redis
        self._script = redis.pipeline.script
        self._prefix = redis_prefix(run)

    async def open(self, record: OpenSession, nonce: str, key_hash: str, lifetime_s: float) -> str:
        """Opens a session and returns its nonce, or the nonce of the session that is already open."""
        kept: bytes = await self._script(
            scripts.OPEN_SESSION,
            self._prefix,
            record.episode_id,
            encode(record),
            nonce,
            key_hash,
            max(1, int(lifetime_s)),
        )
        return kept.decode()

    async def find(self, key_hash: str) -> str:
        """Returns the session id of a key; empty if there is none."""
        found = await self._redis.pipeline.command("GET", f"{self._prefix}session_key:{key_hash}")
        return "" if found is None else found.decode()

    async def read(self, session_id: str, num_known: int = 0, answer: str = "") -> StoredSession | None:
        """Returns a session and its log after the first `num_known` entries; None if it is gone."""
        found = await self._script(scripts.READ_SESSION, self._prefix, session_id, num_known, answer)
        if not found:
            return None
        state, record, nonce, entries, kept = found
        return StoredSession(state == b"open", record, nonce.decode(), tuple(entries), kept or None)

    async def append(
        self,
        session_id: str,
        nonce: str,
        entry_id: str,
        entries: Sequence[bytes],
        *,
        answer: tuple[str, bytes] = ("", b""),
    ) -> int:
        """Appends entries atomically; returns the new length of the log, or `CLOSED`."""
        length: int = await self._script(
            scripts.APPEND_SESSION, self._prefix, session_id, nonce, entry_id, *answer, *entries
        )
        return length

    async def claim(self, session_id: str, name: str, holder: str, lifetime_s: float) -> str:
        """Claims the call of this name for `lifetime_s`; returns `holder` or the earlier holder.

        A holder that claims again renews its claim.
        """
        lifetime_ms = max(1, int(lifetime_s * 1000))
        kept: bytes = await self._script(
            scripts.CLAIM_SESSION, self._prefix, session_id, name, holder, lifetime_ms
        )
        return kept.decode()

    async def unclaim(self, session_id: str, name: str, holder: str) -> None:
        """Releases the claim, if `holder` has it."""
        await self._script(scripts.UNCLAIM_SESSION, self._prefix, session_id, name, holder)

    async def finish(self, session_id: str, key_hash: str = "") -> bool:
        """Closes the log for appends; returns False if the session does not exist.

        With the hash of a key it closes only the session that this key opens.
        """
        return bool(await self._script(scripts.FINISH_SESSION, self._prefix, session_id, key_hash))

    async def delete(self, session_id: str, nonce: str = "") -> None:
        """Deletes a session, its key and its log; with a nonce, only the session that has it."""
        await self._script(scripts.DELETE_SESSION, self._prefix, session_id, nonce)

    async def set_aside(self, session_id: str, nonce: str, error: Exception, *found: bytes) -> None:
        """Deletes a session that cannot be decoded; keeps its bytes and `found` for people."""
        stored = await self.read(session_id)
        if stored is not None and stored.nonce == nonce:
            data = (stored.encoded_record, *stored.entries, *found)
            await quarantine(self._redis, self._prefix, "session", session_id, data, error)
            await self.delete(session_id, nonce)


KEEP_S = 3600  # that an episode is known after its end, for late rewards
OFFER_S = 7 * 86_400  # that an offer waits for agents
_MAX_IDS = 1000  # of one look: Lua unpacks no more than 8,000 values, and Redis serves nobody meanwhile


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
        self._redis = redis
        self._pipeline = redis.pipeline
        self._prefix = redis_prefix(run)

    async def offer(self, offer: OutsideOffer) -> str:
        """Offers an episode and returns its state.

        One that was offered before keeps its result, and its lease, whose time begins anew.
        """
        episode_id, encoded = offer.opening.episode_id, encode(offer)
        state: bytes = await self._run(
            "offer", episode_id, encoded, offer.lease_s, time.time(), OFFER_S
        )
        return state.decode()

    async def lease(self, holder: str) -> OutsideLease | None:
        """Leases an episode: the holder's own if it has one, else the oldest that waits."""
        while found := await self._run("lease", holder, time.time()):
            encoded, used, started, resumed = found
            try:
                offer, started_unix_s = decode(encoded, OutsideOffer), _time_of(started)
            except MALFORMED as error:
                name = await self._pipeline.command("GET", f"{self._prefix}outside_of:{holder}")
                episode_id = name.decode()
                failed = await self._failed("offer", episode_id, (encoded, started), error)
                await self.settle(episode_id, failed)
                continue
            return OutsideLease(offer, used is not None, started_unix_s, bool(resumed))
        return None

    async def bind(self, episode_id: str, key_hash: str) -> None:
        """Makes a key the only one that opens the episode."""
        await self._run("bind", episode_id, key_hash)

    async def id_of_key(self, key_hash: str) -> str:
        """Returns the episode that a key opens, also after its end; empty if there is none."""
        found = await self._pipeline.command("GET", f"{self._prefix}outside_key:{key_hash}")
        return "" if found is None else found.decode()

    async def renew(self, episode_id: str) -> float | None:
        """Prolongs a lease; returns its length in seconds, 0 if the episode is not leased, None if it
        is unknown."""
        found: bytes | None = await self._run("renew", episode_id, time.time())
        return None if found is None else float(found)

    async def state(self, episode_id: str) -> OutsideState | None:
        """Returns the state of an episode; None if it is unknown."""
        key = f"{self._prefix}outside:{episode_id}"
        state, outcome = await self._pipeline.command("HMGET", key, "state", "outcome")
        return None if state is None else OutsideState(state.decode(), (outcome or b"").decode())

    async def settle(self, episode_id: str, result: OutsideResult, key_hash: str = "") -> str:
        """Keeps the first result; returns `taken`, `same`, `other`, `over` or `unknown`.

        With the hash of a key: `lost` if the key does not open the episode any more.
        """
        encoded = encode(result)
        digest = hashlib.blake2b(encoded, digest_size=16).hexdigest()
        settled: bytes = await self._run("settle", episode_id, encoded, digest, key_hash)
        return settled.decode()

    async def progress(self, episode_ids: list[str]) -> dict[str, OutsideProgress]:
        """Returns the progress of these episodes."""
        found: list[Any] = []
        for start in range(0, len(episode_ids), _MAX_IDS):
            found += await self._run("progress", *episode_ids[start : start + _MAX_IDS])
        return {
            (episode_id := name.decode()): await self._progress(episode_id, *fields)
            for name, *fields in found
        }

    async def _progress(
        self, episode_id: str, started: bytes | None, settled: int, encoded: bytes | None
    ) -> OutsideProgress:
        result = None if encoded is None else await self._result(episode_id, encoded)
        try:
            started_unix_s = None if started is None else _time_of(started)
        except ValueError as error:
            failed = await self._failed("first lease", episode_id, (started or b"",), error)
            return OutsideProgress(None, bool(settled), result or failed)
        return OutsideProgress(started_unix_s, bool(settled), result)

    async def close(self, episode_id: str, outcome: str) -> None:
        """Ends an episode: no agent gets it any more."""
        await self._run("close", episode_id, outcome, KEEP_S)

    async def give_up(self, episode_id: str, outcome: str) -> OutsideResult | None:
        """Ends an episode that its agent has not ended; returns the agent's end if there is one."""
        result: bytes | None = await self._run("give_up", episode_id, outcome, KEEP_S)
        return None if result is None else await self._result(episode_id, result)

    async def _result(self, episode_id: str, encoded: bytes) -> OutsideResult:
        try:
            return decode(encoded, OutsideResult)
        except MALFORMED as error:
            return await self._failed("result", episode_id, (encoded,), error)

    async def _failed(
        self, kind: str, episode_id: str, data: tuple[bytes, ...], error: Exception
    ) -> OutsideResult:
        """Sets a corrupted entry aside; returns the end of its episode."""
        await quarantine(self._redis, self._prefix, kind, episode_id, data, error)
        return OutsideResult(Outcome.INFRA_FAILURE, f"its {kind} was corrupted in Redis")

    async def _run(self, operation: str, *args: bytes | str | float) -> Any:
        return await self._pipeline.script(scripts.OUTSIDE_EPISODE, self._prefix, operation, *args)


def _time_of(stored: bytes) -> float:
    """Seconds since 1970; raises `ValueError` for anything else."""
    unix_s = float(stored)
    if not math.isfinite(unix_s):
        raise ValueError(f"no time: {stored!r}")
    return unix_s
