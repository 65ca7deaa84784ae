"""Gateway sessions: what each of them is and a log of all that happened in it.

The log is append-only and holds encoded entries in the order in which they were captured, so that any
replica that read it up to some entry need only ask for the later ones. Appending is atomic and may be
repeated; nothing is appended to a session that is finished or was begun anew. Keys are kept as hashes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tailrace.store import scripts
from tailrace.store.connection import StoreConnection
from tailrace_protos.base import decode, encode
from tailrace_protos.session import OpenSession
from tailrace_protos.subjects import redis_prefix

CLOSED = -1


@dataclass(frozen=True, slots=True)
class StoredSession:
    """A session as Redis knows it, with the log entries that the reader lacked."""

    is_open: bool
    encoded_record: bytes
    nonce: str  # differs between two sessions of one id
    entries: tuple[bytes, ...]
    answer: bytes | None  # the one asked for

    @property
    def record(self) -> OpenSession:
        """What it was opened with; read only where it is wanted, since it never changes."""
        return decode(self.encoded_record, OpenSession)


class SessionLogs:
    """The sessions of one run."""

    def __init__(self, redis: StoreConnection, run: str) -> None:
        self._redis = redis
        self._script = redis.pipeline.script
        self._prefix = redis_prefix(run)

    async def open(self, record: OpenSession, nonce: str, key_hash: str, lifetime_s: float) -> str:
        """Make a session; the nonce of the one that was open already, if there is one."""
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
        """The id of the session that a key opens; empty: none."""
        found = await self._redis.pipeline.command("GET", f"{self._prefix}session_key:{key_hash}")
        return "" if found is None else found.decode()

    async def read(self, session_id: str, num_known: int = 0, answer: str = "") -> StoredSession | None:
        """A session and its log after the first `num_known` entries; None when it is gone."""
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
        """Append entries in one step; the log's new length, or `CLOSED`."""
        length: int = await self._script(
            scripts.APPEND_SESSION, self._prefix, session_id, nonce, entry_id, *answer, *entries
        )
        return length

    async def claim(self, session_id: str, name: str, holder: str, lifetime_s: float) -> str:
        """Who may answer the call of this name: `holder`, or who has it until its time is over.

        A holder that claims again holds it for `lifetime_s` from then on.
        """
        lifetime_ms = max(1, int(lifetime_s * 1000))
        kept: bytes = await self._script(
            scripts.CLAIM_SESSION, self._prefix, session_id, name, holder, lifetime_ms
        )
        return kept.decode()

    async def unclaim(self, session_id: str, name: str, holder: str) -> None:
        """Let the call go, if `holder` has it."""
        await self._script(scripts.UNCLAIM_SESSION, self._prefix, session_id, name, holder)

    async def finish(self, session_id: str) -> bool:
        """Let nothing be appended any more; False when there is no such session."""
        return bool(await self._script(scripts.FINISH_SESSION, self._prefix, session_id))

    async def delete(self, session_id: str) -> None:
        """Forget a session, its key and its log."""
        await self._script(scripts.DELETE_SESSION, self._prefix, session_id)
