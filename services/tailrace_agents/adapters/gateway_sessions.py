"""Sessions with the gateway, over the bus."""

import asyncio
from typing import TypeVar

from tailrace.bus import Bus, BusError, CallFailedError, CallTimeoutError, NoResponderError
from tailrace.log import get_logger
from tailrace.retry import Backoff
from tailrace.store import BlobGoneError, Blobs
from tailrace_agents.core.workflow_player import SessionFailedError
from tailrace_protos import subjects
from tailrace_protos.base import Message, decode
from tailrace_protos.generation import CallErrorCode
from tailrace_protos.session import (
    CloseSession,
    ExportSession,
    OpenSession,
    SessionClosed,
    SessionExport,
    SessionOpened,
)

log = get_logger(__name__)

_TIMEOUT_S = 10.0
_NUM_CLOSE_RETRIES = 3
_PASSING = (CallErrorCode.OVERLOADED, CallErrorCode.NOT_READY)

R = TypeVar("R", bound=Message)


class GatewaySessions:
    """`EpisodeSessions` of one run. Every request to the gateway may be repeated."""

    def __init__(self, bus: Bus, run: str, blobs: Blobs) -> None:
        self._bus = bus
        self._run = run
        self._blobs = blobs
        self._closing: set[asyncio.Task[None]] = set()

    async def open(self, request: OpenSession, *, anew: bool) -> SessionOpened:
        """See `EpisodeSessions`."""
        if anew:
            closing = CloseSession(request.episode_id)
            await self._ask(subjects.gateway_close(self._run), closing, SessionClosed)
        return await self._ask(subjects.gateway_open(self._run), request, SessionOpened)

    async def export(self, request: ExportSession) -> SessionExport:
        """See `EpisodeSessions`."""
        export = await self._ask(subjects.gateway_export(self._run), request, SessionExport)
        if not export.blob:
            return export
        try:
            return decode(await self._blobs.get(export.blob), SessionExport)
        except BlobGoneError as error:
            raise SessionFailedError(f"gateway: the rows of the session are gone: {error}") from error

    def close(self, opened: SessionOpened) -> None:
        """See `EpisodeSessions`."""
        closing = asyncio.create_task(self._close(opened))
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)

    async def drain(self) -> None:
        """Return once every session is closed, or given up."""
        await asyncio.gather(*self._closing)

    async def _close(self, opened: SessionOpened) -> None:
        try:
            await self._bus.request(
                subjects.gateway_close(self._run),
                CloseSession(opened.session_id, opened.api_key),
                SessionClosed,
                timeout_s=_TIMEOUT_S,
                idempotent_retries=_NUM_CLOSE_RETRIES,
            )
        except BusError as error:  # it ends by itself at its deadline
            log.warning("session not closed", session_id=opened.session_id, reason=str(error))

    async def _ask(self, subject: str, message: Message, reply_type: type[R]) -> R:
        """The answer, however long no gateway can give one: the caller has a deadline."""
        backoff = Backoff(0.05, 2.0)
        while True:
            try:
                return await self._bus.request(subject, message, reply_type, timeout_s=_TIMEOUT_S)
            except (NoResponderError, CallTimeoutError) as error:
                log.warning("waiting for a gateway", subject=subject, reason=str(error))
            except CallFailedError as error:
                if error.code not in _PASSING:
                    raise SessionFailedError(f"gateway: {error.reason}") from error
            except BusError as error:
                raise SessionFailedError(f"gateway: {error}") from error
            await backoff.sleep()
