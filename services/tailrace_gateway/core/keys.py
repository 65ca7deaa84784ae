"""Session keys, derived from the admin key and a nonce: replicas need not store them.

Opening an open session again gives the same key; a new session under an old id has another key. Stores
see only hashes. Keys are long and random, so a fast hash is sufficient.
"""

from __future__ import annotations

import hashlib
import hmac

PREFIX = "tr-"


def session_key(admin_key: str, run: str, session_id: str, nonce: str) -> str:
    """Return the key of a session."""
    message = f"{run}\n{session_id}\n{nonce}".encode()
    return PREFIX + hmac.new(admin_key.encode(), message, hashlib.sha256).hexdigest()


def key_hash(key: str) -> str:
    """Return the hash of a key, which stores may hold."""
    return hashlib.sha256(key.encode()).hexdigest()


def is_same_key(given: str, expected: str) -> bool:
    """Compare two keys in constant time."""
    return hmac.compare_digest(given.encode(), expected.encode())
