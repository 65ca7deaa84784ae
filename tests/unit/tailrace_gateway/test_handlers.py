"""Session requests of agents while the store is away."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tailrace.bus import CallFailedError
from tailrace.store import StoreError
from tailrace_gateway.handlers import MAX_INLINE_BYTES, SessionHandler
from tailrace_protos.chat import ChatMessage
from tailrace_protos.generation import CallErrorCode
from tailrace_protos.session import ExportSession, SessionClosed, SessionExport

LARGE = SessionExport(messages=(ChatMessage("user", "x" * MAX_INLINE_BYTES),))


async def test_a_large_export_that_the_store_does_not_take_now_may_be_asked_for_again() -> None:
    async def export(request: ExportSession) -> tuple[str, SessionExport]:
        return "nonce", LARGE

    async def announce(closed: SessionClosed) -> None:
        """Nobody hears it."""

    async def put_blob(data: bytes) -> str:
        raise StoreError("away")

    gateway: Any = SimpleNamespace(exporter=SimpleNamespace(export=export))
    store: Any = None
    handler = SessionHandler(gateway, store, lambda: "", announce, put_blob)
    with pytest.raises(CallFailedError) as failed:
        await handler.export(ExportSession("e1", {"": 1.0}))
    assert (failed.value.code, failed.value.retry_after_s) == (CallErrorCode.NOT_READY, 1.0)
