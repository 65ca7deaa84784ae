"""Redis behind small interfaces: the trajectory buffer, the outbox, the journal, blobs and versions.

Redis holds the truth about a run's groups and episodes. Every state change is one Lua script that
also writes its audit event, every script may be repeated, and so a Redis that is killed and started
again only delays its callers.

| module | holds |
|---|---|
| `connection` | `connect`, `StoreConnection`: calls that reconnect, retry and share pipelines |
| `pipeline` | `AutoPipeline`: what is issued in one loop tick goes out together |
| `buffer` | `TrajectoryBuffer`: groups from admission to the learner's checkpoint |
| `groups` | the records that the buffer takes and returns |
| `sessions` | `SessionLogs`: gateway sessions and all that happened in them |
| `outbox` `journal` | events on their way to EVENTS; finished turns of running episodes |
| `blobs` | claim checks, the model card, policy versions |
| `scripts` `lua/` | the Lua scripts: atomic state changes |
"""

from tailrace.store.blobs import Blobs, Versions
from tailrace.store.buffer import TrajectoryBuffer
from tailrace.store.connection import StoreConnection, connect
from tailrace.store.errors import (
    BlobGoneError,
    StoreError,
    StoreFullError,
    StoreRefusedError,
    StoreUnavailableError,
)
from tailrace.store.groups import BufferCounters, GroupRecord, PutResult, ReadyGroup
from tailrace.store.journal import AppendResult, Journal
from tailrace.store.outbox import Outbox
from tailrace.store.pipeline import AutoPipeline
from tailrace.store.sessions import SessionLogs, StoredSession

__all__ = [
    "AppendResult",
    "AutoPipeline",
    "BlobGoneError",
    "Blobs",
    "BufferCounters",
    "GroupRecord",
    "Journal",
    "Outbox",
    "PutResult",
    "ReadyGroup",
    "SessionLogs",
    "StoreConnection",
    "StoreError",
    "StoreFullError",
    "StoreRefusedError",
    "StoreUnavailableError",
    "StoredSession",
    "TrajectoryBuffer",
    "Versions",
    "connect",
]
