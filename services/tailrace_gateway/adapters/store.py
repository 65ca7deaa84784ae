"""Session logs in Redis. What Redis cannot answer in time is a `StoreLostError`."""

from __future__ import annotations

from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar

from tailrace.store import SessionLogs, StoredSession, StoreError
from tailrace_gateway.ports import StoreLostError
from tailrace_protos.session import OpenSession

T = TypeVar("T")


class RedisSessions:
    """`SessionStore` over `SessionLogs`, on a connection of limited patience."""

    def __init__(self, logs: SessionLogs) -> None:
        self._logs = logs

    async def open(self, record: OpenSession, nonce: str, key_hash: str, lifetime_s: float) -> str:
        """See `SessionStore`."""
        return await _answered(self._logs.open(record, nonce, key_hash, lifetime_s))

    async def find(self, key_hash: str) -> str:
        """See `SessionStore`."""
        return await _answered(self._logs.find(key_hash))

    async def read(self, session_id: str, num_known: int = 0, answer: str = "") -> StoredSession | None:
        """See `SessionStore`."""
        return await _answered(self._logs.read(session_id, num_known, answer))

    async def append(
        self,
        session_id: str,
        nonce: str,
        entry_id: str,
        entries: Sequence[bytes],
        *,
        answer: tuple[str, bytes] = ("", b""),
    ) -> int:
        """See `SessionStore`."""
        return await _answered(self._logs.append(session_id, nonce, entry_id, entries, answer=answer))

    async def claim(self, session_id: str, name: str, holder: str, lifetime_s: float) -> str:
        """See `SessionStore`."""
        return await _answered(self._logs.claim(session_id, name, holder, lifetime_s))

    async def unclaim(self, session_id: str, name: str, holder: str) -> None:
        """See `SessionStore`."""
        await _answered(self._logs.unclaim(session_id, name, holder))

    async def finish(self, session_id: str) -> bool:
        """See `SessionStore`."""
        return await _answered(self._logs.finish(session_id))

    async def delete(self, session_id: str) -> None:
        """See `SessionStore`."""
        await _answered(self._logs.delete(session_id))


async def _answered(work: Coroutine[Any, Any, T]) -> T:
    try:
        return await work
    except StoreError as error:
        raise StoreLostError(str(error)) from error
