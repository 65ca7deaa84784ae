"""What the core needs from outside: a policy, a log of sessions, and somebody to tell."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from tailrace.sdk.policy import Policy
from tailrace_protos.session import OpenSession


class SessionPolicy(Policy, Protocol):
    """A policy that leases a server for each episode."""

    def begin(self, episode_id: str, predicted_tokens: int) -> None:
        """An episode starts that will need about so many tokens."""

    def end(self, episode_id: str) -> None:
        """The episode ended; its lease is free."""


class SessionState(Protocol):
    """A session as the store knows it, with the log entries that the reader lacked."""

    @property
    def is_open(self) -> bool:
        """Whether calls may still be appended."""

    @property
    def record(self) -> OpenSession:
        """What it was opened with."""

    @property
    def nonce(self) -> str:
        """Differs between two sessions of one id."""

    @property
    def entries(self) -> tuple[bytes, ...]:
        """Encoded `LedgerNode`s and `RewardSet`s."""

    @property
    def answer(self) -> bytes | None:
        """The recorded answer that was asked for."""


class SessionStore(Protocol):
    """Sessions beyond this process. All methods raise `StoreError` when they cannot answer."""

    async def open(self, record: OpenSession, nonce: str, key_hash: str, lifetime_s: float) -> str:
        """Make a session; the nonce of the one that was open already, if there is one."""

    async def find(self, key_hash: str) -> str:
        """The id of the session that a key opens; empty: none."""

    async def read(self, session_id: str, num_known: int = 0, answer: str = "") -> SessionState | None:
        """A session and its log after the first `num_known` entries; None when it is gone."""

    async def append(
        self,
        session_id: str,
        nonce: str,
        entry_id: str,
        entries: Sequence[bytes],
        *,
        answer: tuple[str, bytes] = ("", b""),
    ) -> int:
        """Append entries in one step; the log's new length, or -1 when the session is over."""

    async def claim(self, session_id: str, name: str, holder: str, lifetime_s: float) -> str:
        """Who may answer the call of this name: `holder`, or who has it until its time is over."""

    async def unclaim(self, session_id: str, name: str, holder: str) -> None:
        """Let the call go, if `holder` has it."""

    async def finish(self, session_id: str) -> bool:
        """Let nothing be appended any more; False when there is no such session."""

    async def delete(self, session_id: str) -> None:
        """Forget a session."""
