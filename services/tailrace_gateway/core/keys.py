"""Keys: one per session, made from the admin's and a nonce, so that no replica has to keep it.

Opening a session twice gives the same key; a session begun anew under an old name has another one.
Stores see hashes only. The keys are long and random, so a plain hash is as good as a slow one.
"""

from __future__ import annotations

import hashlib
import hmac

PREFIX = "tr-"


def session_key(admin_key: str, run: str, session_id: str, nonce: str) -> str:
    """The key of a session."""
    said = f"{run}\n{session_id}\n{nonce}".encode()
    return PREFIX + hmac.new(admin_key.encode(), said, hashlib.sha256).hexdigest()


def key_hash(key: str) -> str:
    """What may be written down of a key."""
    return hashlib.sha256(key.encode()).hexdigest()


def is_same_key(given: str, expected: str) -> bool:
    """Comparison in constant time."""
    return hmac.compare_digest(given.encode(), expected.encode())
