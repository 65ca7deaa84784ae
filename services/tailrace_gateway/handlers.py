"""Session requests over NATS from the agents service: decode -> core -> reply."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from tailrace.bus import CallFailedError
from tailrace.store.errors import StoreError
from tailrace_gateway.core.errors import ApiError
from tailrace_gateway.core.gateway import Gateway
from tailrace_gateway.core.sessions import key_hash
from tailrace_gateway.ports import SessionStore
from tailrace_protos.base import encode
from tailrace_protos.generation import CallErrorCode
from tailrace_protos.session import (
    CloseSession,
    ExportSession,
    OpenSession,
    SessionClosed,
    SessionExport,
    SessionOpened,
)

# Larger exports travel by claim check; a NATS server takes 1 MiB by default.
MAX_INLINE_BYTES = 512 * 1024


@dataclass(frozen=True)
class SessionHandler:
    """Handles open, export and close."""

    gateway: Gateway
    store: SessionStore
    base_url: Callable[[], str]
    announce: Callable[[SessionClosed], Awaitable[None]]  # tells all replicas that a session is closed
    put_blob: Callable[[bytes], Awaitable[str]]

    async def open(self, request: OpenSession) -> SessionOpened:
        """Open a session, or find it."""
        try:
            key = await self.gateway.sessions.open(request)
        except ApiError as error:
            raise _call_failed(error) from error
        return SessionOpened(request.episode_id, self.base_url(), key)

    async def export(self, request: ExportSession) -> SessionExport:
        """Return an export inline, or a large one by claim check (an encoded `SessionExport`)."""
        try:
            exported = await self.finish(request)
        except ApiError as error:
            raise _call_failed(error) from error
        whole = encode(exported)
        if len(whole) <= MAX_INLINE_BYTES:
            return exported
        try:
            return SessionExport(blob=await self.put_blob(whole), metrics=exported.metrics)
        except StoreError as error:
            raise _store_failed(error) from error

    async def finish(self, request: ExportSession) -> SessionExport:
        """Export with all rows inline and cancel the session's calls in all replicas."""
        nonce, exported = await self.gateway.exporter.export(request)
        await self.announce(SessionClosed(request.session_id, nonce))
        return exported

    async def close(self, request: CloseSession) -> SessionClosed:
        """Delete a session."""
        try:
            await self.forget(request.session_id, request.api_key)
        except StoreError as error:
            raise _store_failed(error) from error
        return SessionClosed(request.session_id)

    async def forget(self, session_id: str, api_key: str = "") -> None:
        """Delete a session in all replicas; do nothing if there is none, or if the key is another's."""
        sessions, stored = self.gateway.sessions, await self.store.read(session_id)
        if stored is None or api_key not in ("", sessions.key_of(session_id, stored.nonce)):
            return
        await self.store.delete(session_id, stored.nonce)
        sessions.forget(session_id, stored.nonce)
        await self.announce(SessionClosed(session_id, stored.nonce))

    async def end_calls(self, session_id: str, key: str = "") -> None:
        """Close a session for calls in all replicas and end those in flight; its log stays.

        With a key, close only the session that this key opens.
        """
        if await self.store.finish(session_id, key_hash(key) if key else ""):
            self.gateway.sessions.forget(session_id)
            await self.announce(SessionClosed(session_id))

    async def on_closed(self, message: SessionClosed) -> None:
        """Drop a session that another replica closed or exported."""
        self.gateway.sessions.forget(message.session_id, message.nonce)


def _store_failed(error: StoreError) -> CallFailedError:
    return CallFailedError(CallErrorCode.NOT_READY, str(error), 1.0)


def _call_failed(error: ApiError) -> CallFailedError:
    code = CallErrorCode.INVALID if error.retry_after_s is None else CallErrorCode.NOT_READY
    return CallFailedError(code, error.message, error.retry_after_s or 0.0)
