"""Ports of the core: the policy, and the store of sessions.

Both have a local variant for the terminal, which plays episodes without a cluster.
"""

from collections.abc import Sequence
from typing import Protocol

from tailrace.sdk.policy import Policy
from tailrace_protos.session import OpenSession


class SessionPolicy(Policy, Protocol):
    """Policy that leases a server for each episode."""

    def begin(self, episode_id: str) -> None:
        """Start an episode."""

    def end(self, episode_id: str) -> None:
        """End the episode and release its lease."""


class SessionState(Protocol):
    """Session in the store, with the log entries that the reader does not have."""

    @property
    def is_open(self) -> bool:
        """True if calls may append."""

    @property
    def record(self) -> OpenSession:
        """The request that opened the session."""

    @property
    def nonce(self) -> str:
        """Distinguishes sessions of the same id."""

    @property
    def entries(self) -> tuple[bytes, ...]:
        """Encoded `LedgerNode`s, `RewardSet`s and `CallRefused`s."""

    @property
    def answer(self) -> bytes | None:
        """The requested answer record."""


class SessionStore(Protocol):
    """Sessions that replicas share. All methods raise `StoreError` if the store cannot answer."""

    async def open(self, record: OpenSession, nonce: str, key_hash: str, lifetime_s: float) -> str:
        """Open a session; return its nonce, or the nonce of the session of this id that is open
        already."""

    async def find(self, key_hash: str) -> str:
        """Return the id of the session that a key opens; empty: none."""

    async def read(self, session_id: str, num_known: int = 0, answer: str = "") -> SessionState | None:
        """Return a session and its log after the first `num_known` entries; None if it is gone."""

    async def append(
        self,
        session_id: str,
        nonce: str,
        entry_id: str,
        entries: Sequence[bytes],
        *,
        answer: tuple[str, bytes] = ("", b""),
    ) -> int:
        """Append entries atomically; return the log's new length, or -1 if the session is closed."""

    async def claim(self, session_id: str, name: str, holder: str, lifetime_s: float) -> str:
        """Return the holder of the call of this name: `holder`, or an earlier holder until its claim
        expires."""

    async def unclaim(self, session_id: str, name: str, holder: str) -> None:
        """Release the claim if `holder` has it."""

    async def finish(self, session_id: str, key_hash: str = "") -> bool:
        """Close a session for appends; return False if there is none. With the hash of a key, close
        only the session that this key opens."""

    async def delete(self, session_id: str, nonce: str = "") -> None:
        """Delete a session; with a nonce, only the session that has it."""

    async def set_aside(self, session_id: str, nonce: str, error: Exception, *found: bytes) -> None:
        """Delete a session that cannot be decoded; keep its bytes and `found` for people."""
