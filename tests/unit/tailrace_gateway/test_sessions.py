"""A replica's sessions against a store whose answers cross a drop from memory."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from tailrace.clock import SystemClock
from tailrace.ledger import Ledger
from tailrace.store import StoreError
from tailrace.store.sessions import StoredSession
from tailrace_gateway.core.errors import UnavailableError
from tailrace_gateway.core.exports import Exporter
from tailrace_gateway.core.sessions import Identity, Sessions
from tailrace_protos.base import encode
from tailrace_protos.session import CallRefused, ExportSession, OpenSession, SessionLimits
from tests.world.byte_model import renderer

RECORD = OpenSession("e1", SessionLimits(100, 100, 2e9))
LOG = tuple(encode(CallRefused(code)) for code in ("first", "second"))


class FakeStore:
    """Store with one open session of two entries; `meanwhile` happens while a read is on its way."""

    def __init__(self) -> None:
        self.meanwhile: Callable[[], None] = lambda: None

    async def open(self, record: OpenSession, nonce: str, key_hash: str, lifetime_s: float) -> str:
        self.nonce = nonce
        return nonce

    async def read(self, session_id: str, num_known: int = 0, answer: str = "") -> StoredSession:
        answered = StoredSession(True, encode(RECORD), self.nonce, LOG[num_known:], None)
        happens, self.meanwhile = self.meanwhile, lambda: None
        happens()
        return answered

    async def finish(self, session_id: str, key_hash: str = "") -> bool:
        return True


async def test_a_session_that_is_dropped_during_a_read_is_read_again_whole() -> None:
    store = FakeStore()
    policy: Any = SimpleNamespace(begin=lambda *_: None, end=lambda *_: None)
    ledger: Any = object
    kept: Any = store
    sessions = Sessions(Identity("run", "key", (), 1.0, 1.0), kept, policy, ledger, SystemClock())
    await sessions.open(RECORD)
    first, _ = await sessions.refresh("e1")
    assert first.refusals == {"first", "second"}
    store.meanwhile = lambda: sessions.forget("e1")
    again, _ = await sessions.refresh("e1")
    assert again is not first
    assert again.refusals == {"first", "second"}


async def test_no_export_is_made_of_what_one_replica_knows_while_the_store_is_away() -> None:
    store = FakeStore()
    policy: Any = SimpleNamespace(begin=lambda *_: None, end=lambda *_: None)
    kept: Any = store
    sessions = Sessions(
        Identity("run", "key", (), 1.0, 1.0), kept, policy, lambda: Ledger(renderer()), SystemClock()
    )
    await sessions.open(RECORD)

    def fail() -> None:
        raise StoreError("away")

    store.meanwhile = fail
    exporter = Exporter(sessions, kept)
    with pytest.raises(UnavailableError) as refused:
        await exporter.export(ExportSession("e1", {"": 1.0}))
    assert refused.value.retry_after_s is not None
    _, exported = await exporter.export(ExportSession("e1", {"": 1.0}))
    assert exported.refusals == ("first", "second")
