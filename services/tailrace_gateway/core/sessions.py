"""Sessions of this replica: found by key, refreshed from the log, dropped when idle.

The log in the store is authoritative; memory saves reading it again. While the store is unavailable, a
session in memory continues and any other session waits. A corrupted log is set aside: its session is
over, and one of the same id may be opened.

Keys: each session has its own, derived from the admin key and a nonce, so that replicas need not store
it. Opening an open session again gives the same key; a new session under an old id has another key.
Stores see only hashes of keys. Keys are long and random, so a fast hash is sufficient.
"""

import hashlib
import hmac
import uuid
from collections.abc import Callable
from typing import NamedTuple

import msgspec

from tailrace.clock import Clock
from tailrace.ledger import Ledger
from tailrace.store.errors import MALFORMED, StoreError
from tailrace_gateway import metrics
from tailrace_gateway.core.errors import (
    ApiError,
    SessionCorruptedError,
    SessionOverError,
    UnauthorizedError,
    UnavailableError,
)
from tailrace_gateway.core.session import Session
from tailrace_gateway.ports import SessionPolicy, SessionState, SessionStore
from tailrace_protos.generation import SamplingParams
from tailrace_protos.session import OpenSession

_STORE_RETRY_AFTER_S = 1.0
_KEY_PREFIX = "tr-"


class Identity(NamedTuple):
    """Run, admin key and lifetimes of a gateway."""

    run: str
    admin_key: str
    stop_token_ids: tuple[int, ...]
    keep_s: float  # how long a session's log outlives its deadline
    idle_s: float  # an unused session leaves memory after this time


class Sessions:
    """Opens, finds, refreshes and drops sessions."""

    def __init__(
        self,
        identity: Identity,
        store: SessionStore,
        policy: SessionPolicy,
        make_ledger: Callable[[], Ledger],
        clock: Clock,
    ) -> None:
        self.identity = identity
        self._store = store
        self._policy = policy
        self._make_ledger = make_ledger
        self._clock = clock
        self._sessions: dict[str, Session] = {}
        self._ids: dict[str, str] = {}  # session id by key hash, for sessions in memory

    def __len__(self) -> int:
        return len(self._sessions)

    def busy(self) -> list[Session]:
        """Return the sessions with calls in flight."""
        return [session for session in self._sessions.values() if session.calls]

    async def open(self, record: OpenSession) -> str:
        """Open a session, or find the open one of this id and give it these limits; return its key."""
        who, nonce = self.identity, uuid.uuid4().hex
        fresh = self.key_of(record.episode_id, nonce)
        lifetime_s = max(record.limits.deadline_unix_s - self._clock.unix_s(), 0.0) + who.keep_s
        try:
            kept = await self._store.open(record, nonce, key_hash(fresh), lifetime_s)
        except StoreError as error:
            raise _store_error(error) from error
        if kept == nonce:
            self.forget(record.episode_id)  # an earlier session of this id
            self._begin(record, nonce)
            return fresh
        known = self.known(record.episode_id)
        if known is not None and known.nonce == kept:
            self._renew(known, record)
        return self.key_of(record.episode_id, kept)

    def key_of(self, session_id: str, nonce: str) -> str:
        """Return the key of a session."""
        who = self.identity
        message = f"{who.run}\n{session_id}\n{nonce}".encode()
        return _KEY_PREFIX + hmac.new(who.admin_key.encode(), message, hashlib.sha256).hexdigest()

    def is_admin(self, key: str) -> bool:
        """True if this is the admin key; the comparison takes constant time."""
        return hmac.compare_digest(key.encode(), self.identity.admin_key.encode())

    def known_id(self, key: str) -> str:
        """Return the id of the session in memory that a key opens, or an empty string."""
        return self._ids.get(key_hash(key), "")

    async def id_of_key(self, key: str) -> str:
        """Return the session that a key opens; raise `UnauthorizedError` if there is none."""
        try:
            session_id = await self._store.find(key_hash(key))
        except StoreError as error:
            raise _store_error(error) from error
        if not session_id:
            raise UnauthorizedError("this key belongs to no open session")
        return session_id

    def known(self, session_id: str) -> Session | None:
        """Return the session in memory without a read of the store."""
        return self._sessions.get(session_id)

    def use(self, session_id: str) -> Session | None:
        """Return the session in memory and mark it as used, without a read of the store."""
        session = self._sessions.get(session_id)
        return None if session is None else self._in_use(session)

    async def refresh(
        self, session_id: str, answer: str = "", *, may_be_old: bool = True
    ) -> tuple[Session, bytes | None]:
        """Return the session with everything that any replica recorded, and the recorded answer if any.

        `may_be_old`: while the store is unavailable, return what this replica knows. Raise
        `SessionOverError` if the session is closed, `SessionCorruptedError` if it is corrupted.
        """
        session = self._sessions.get(session_id)
        num_known = session.num_read if session is not None else 0
        try:
            stored = await self._store.read(session_id, num_known, answer)
        except StoreError as error:
            if session is None or not may_be_old:
                raise _store_error(error) from error
            metrics.STALE_READS.inc()
            return self._in_use(session), None
        if session is not None and not self._is_kept(session, stored):
            # The store told only what `session` did not know: read everything.
            return await self.refresh(session_id, answer, may_be_old=may_be_old)
        if stored is None:
            raise SessionOverError(f"the session {session_id!r} was closed")
        try:
            session = self._applied(session_id, stored, num_known)
        except MALFORMED as error:
            raise await self.set_aside(session_id, stored.nonce, error) from error
        return self._in_use(session), stored.answer

    def _applied(self, session_id: str, stored: SessionState, num_known: int) -> Session:
        """Return the session with what the store told; raise one of `MALFORMED`."""
        record = _record_of(session_id, stored)
        session = self._sessions.get(session_id) or self._begin(record, stored.nonce)
        self._renew(session, record)  # another replica may have opened it again
        session.apply(stored.entries, num_known)
        if not stored.is_open:
            session.close()
        return session

    async def set_aside(
        self, session_id: str, nonce: str, corruption: Exception, *found: bytes
    ) -> SessionCorruptedError:
        """End a session that cannot be decoded and keep its bytes, and those in `found`, for people.

        Return the error of its callers. Another replica learns the end with its next append.
        """
        try:
            await self._store.set_aside(session_id, nonce, corruption, *found)
        except StoreError as error:
            raise _store_error(error) from error
        over = SessionCorruptedError(
            f"the session {session_id!r} was corrupted in the store and is set aside: open it again"
        )
        self.forget(session_id, nonce, over)
        return over

    def _is_kept(self, session: Session, stored: SessionState | None) -> bool:
        """Tell whether memory has this session still; drop it if the store has another of its id."""
        if stored is None or stored.nonce != session.nonce:
            self.forget(session.session_id)
        return self._sessions.get(session.session_id) is session

    async def load(self, session_id: str) -> Session | None:
        """Return the session with its whole log, open or finished; None if there is none.

        Raise `UnavailableError` while the store is away: another replica may have recorded more.
        """
        try:
            session, _ = await self.refresh(session_id, may_be_old=False)
        except SessionOverError:
            return None
        return session

    def forget(self, session_id: str, nonce: str = "", error: ApiError | None = None) -> None:
        """Drop a session from memory and end its calls, with `error` if there is one.

        With a nonce, drop only that session: a new session may have the same id.
        """
        session = self._sessions.get(session_id)
        if session is None or nonce not in ("", session.nonce):
            return
        del self._sessions[session_id]
        session.close(error)
        self._ids.pop(session.key_hash, None)
        self._policy.end(session_id)

    def reap(self) -> None:
        """Drop sessions that are past their deadline or idle for long."""
        now_s, now_unix_s = self._clock.monotonic_s(), self._clock.unix_s()
        for session_id, session in list(self._sessions.items()):
            is_idle = not session.calls and now_s - session.last_used_s > self.identity.idle_s
            if is_idle or now_unix_s > session.record.limits.deadline_unix_s + self.identity.idle_s:
                self.forget(session_id)

    def _begin(self, record: OpenSession, nonce: str) -> Session:
        hashed = key_hash(self.key_of(record.episode_id, nonce))
        sampling = self._sampling(record.sampling)
        session = self._in_use(Session(record, nonce, hashed, self._make_ledger(), sampling))
        self._sessions[record.episode_id] = session
        self._ids[hashed] = record.episode_id
        self._policy.begin(record.episode_id)
        return session

    def _renew(self, session: Session, record: OpenSession) -> None:
        if record != session.record:
            session.record, session.sampling = record, self._sampling(record.sampling)

    def _sampling(self, params: SamplingParams) -> SamplingParams:
        stop_ids = tuple(sorted({*params.stop_token_ids, *self.identity.stop_token_ids}))
        return msgspec.structs.replace(params, stop_token_ids=stop_ids)

    def _in_use(self, session: Session) -> Session:
        session.last_used_s = self._clock.monotonic_s()
        return session


def _record_of(session_id: str, stored: SessionState) -> OpenSession:
    record = stored.record
    if record.episode_id != session_id:
        raise ValueError(f"its record is that of {record.episode_id!r}")
    return record


def _store_error(error: StoreError) -> UnavailableError:
    return UnavailableError(f"sessions cannot be read: {error}", retry_after_s=_STORE_RETRY_AFTER_S)


def key_hash(key: str) -> str:
    """Return the hash of a key, which stores may hold."""
    return hashlib.sha256(key.encode()).hexdigest()
