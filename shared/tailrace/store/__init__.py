"""Redis behind small interfaces: trajectory buffer, outbox, journal, sessions, blobs and versions.

Redis holds the state of a run's groups and episodes. Each state change is one Lua script that also
writes its audit event. Each script may be repeated, so a restart of Redis only delays its callers.

| module | content |
|---|---|
| `connection` | `connect`, `StoreConnection`: calls that reconnect, retry and share pipelines |
| `pipeline` | `AutoPipeline`: the commands of one loop tick share a round trip |
| `buffer` | `TrajectoryBuffer`: groups from admission to the learner's checkpoint |
| `groups` | the records of the buffer |
| `sessions` | `SessionLogs`: gateway sessions and their logs; `OutsideEpisodes` |
| `outbox` | events for EVENTS; finished turns of running episodes |
| `quarantine` | entries that cannot be decoded |
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
from tailrace.store.outbox import AppendResult, Journal, Outbox
from tailrace.store.pipeline import AutoPipeline
from tailrace.store.sessions import OutsideEpisodes, SessionLogs, StoredSession

__all__ = [
    "AppendResult",
    "AutoPipeline",
    "BlobGoneError",
    "Blobs",
    "BufferCounters",
    "GroupRecord",
    "Journal",
    "Outbox",
    "OutsideEpisodes",
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
