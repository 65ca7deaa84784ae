"""Entries of Redis that cannot be decoded: set aside for people, counted, and no loop's end.

A corrupted entry is a bug or a foreign writer. Its bytes are kept for a week under `quarantine:<kind>:
<name>`; its reader goes on without it.
"""

from collections.abc import Iterable

import msgspec
from prometheus_client import Counter

from tailrace.log import get_logger
from tailrace.store.connection import StoreConnection

log = get_logger(__name__)

_KEPT_S = 7 * 24 * 3600
_CORRUPTED = Counter(
    "tailrace_store_corrupted_entries", "Entries of Redis that could not be decoded.", ["kind"]
)


async def quarantine(
    redis: StoreConnection, prefix: str, kind: str, name: str, data: Iterable[object], error: Exception
) -> None:
    """Keeps the bytes of an entry under a key of its own, counts it and logs it."""
    _CORRUPTED.labels(kind).inc()
    reason = f"{type(error).__name__}: {error}"
    log.error("corrupted entry set aside", kind=kind, name=name, reason=reason)
    parts = [part for part in data if isinstance(part, bytes)]
    key = f"{prefix}quarantine:{kind}:{name}"
    await redis.command("SET", key, msgspec.msgpack.encode((reason, parts)), "EX", _KEPT_S)
