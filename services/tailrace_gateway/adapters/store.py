"""Session logs in Redis, for callers that cannot wait for an outage to end."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar

from tailrace.store import SessionLogs, StoredSession, StoreError
from tailrace_gateway.ports import StoreLostError
from tailrace_protos.session import OpenSession

T = TypeVar("T")


class TimedSessionLogs:
    """`SessionStore` over `SessionLogs`; every call answers or fails within `timeout_s`."""

    def __init__(self, logs: SessionLogs, timeout_s: float) -> None:
        self._logs = logs
        self._timeout_s = timeout_s

    async def open(self, record: OpenSession, nonce: str, key_hash: str, lifetime_s: float) -> str:
        """See `SessionStore`."""
        return await self._in_time(self._logs.open(record, nonce, key_hash, lifetime_s))

    async def find(self, key_hash: str) -> str:
        """See `SessionStore`."""
        return await self._in_time(self._logs.find(key_hash))

    async def read(self, session_id: str, num_known: int = 0, answer: str = "") -> StoredSession | None:
        """See `SessionStore`."""
        return await self._in_time(self._logs.read(session_id, num_known, answer))

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
        return await self._in_time(
            self._logs.append(session_id, nonce, entry_id, entries, answer=answer)
        )

    async def finish(self, session_id: str) -> bool:
        """See `SessionStore`."""
        return await self._in_time(self._logs.finish(session_id))

    async def delete(self, session_id: str) -> None:
        """See `SessionStore`."""
        await self._in_time(self._logs.delete(session_id))

    async def _in_time(self, work: Coroutine[Any, Any, T]) -> T:
        try:
            async with asyncio.timeout(self._timeout_s):
                return await work
        except TimeoutError as error:
            raise StoreLostError(f"Redis did not answer within {self._timeout_s:g} s") from error
        except StoreError as error:
            raise StoreLostError(str(error)) from error
