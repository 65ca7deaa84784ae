"""Session requests over NATS from the agents service: decode -> core -> reply."""

from collections.abc import Awaitable, Callable

from tailrace.bus import CallFailedError
from tailrace.store.errors import StoreError
from tailrace_gateway.core.errors import ApiError
from tailrace_gateway.core.gateway import Gateway
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

# Larger exports travel by claim check; the limit of a NATS message is 1 MiB.
MAX_INLINE_BYTES = 512 * 1024

Announce = Callable[[SessionClosed], Awaitable[None]]
PutBlob = Callable[[bytes], Awaitable[str]]


class SessionHandler:
    """Handles open, export and close. `announce` tells all replicas that a session is closed."""

    def __init__(
        self,
        gateway: Gateway,
        store: SessionStore,
        base_url: Callable[[], str],
        announce: Announce,
        put_blob: PutBlob,
    ) -> None:
        self._sessions = gateway.sessions
        self._exporter = gateway.exporter
        self._store = store
        self._base_url = base_url
        self._announce = announce
        self._put_blob = put_blob

    async def open(self, request: OpenSession) -> SessionOpened:
        """Open a session, or find it."""
        try:
            key = await self._sessions.open(request)
        except ApiError as error:
            raise _call_failed(error) from error
        return SessionOpened(request.episode_id, self._base_url(), key)

    async def export(self, request: ExportSession) -> SessionExport:
        """Return an export inline, or a large one by claim check (an encoded `SessionExport`)."""
        try:
            exported = await self.finish(request)
        except ApiError as error:
            raise _call_failed(error) from error
        whole = encode(exported)
        if len(whole) <= MAX_INLINE_BYTES:
            return exported
        return SessionExport(blob=await self._put_blob(whole), metrics=exported.metrics)

    async def finish(self, request: ExportSession) -> SessionExport:
        """Export with all rows inline and cancel the session's calls in all replicas."""
        nonce, exported = await self._exporter.export(request)
        await self._announce(SessionClosed(request.session_id, nonce))
        return exported

    async def close(self, request: CloseSession) -> SessionClosed:
        """Delete a session."""
        try:
            await self.forget(request.session_id, request.api_key)
        except StoreError as error:
            raise CallFailedError(CallErrorCode.NOT_READY, str(error), 1.0) from error
        return SessionClosed(request.session_id)

    async def forget(self, session_id: str, api_key: str = "") -> None:
        """Delete a session in all replicas; do nothing if there is none, or if the key is another's."""
        stored = await self._store.read(session_id)
        if stored is None or api_key not in ("", self._sessions.key_of(session_id, stored.nonce)):
            return
        await self._store.delete(session_id, stored.nonce)
        self._sessions.forget(session_id, stored.nonce)
        await self._announce(SessionClosed(session_id, stored.nonce))

    async def on_closed(self, message: SessionClosed) -> None:
        """Drop a session that another replica closed or exported."""
        self._sessions.forget(message.session_id, message.nonce)


def _call_failed(error: ApiError) -> CallFailedError:
    code = CallErrorCode.INVALID if error.retry_after_s is None else CallErrorCode.NOT_READY
    return CallFailedError(code, error.message, error.retry_after_s or 0.0)
