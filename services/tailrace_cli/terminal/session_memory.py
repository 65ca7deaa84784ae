"""Sessions of a gateway in this process: kept in memory, every call shown on the screen."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from tailrace_cli.terminal.screen import Screen
from tailrace_protos.base import MalformedMessageError, decode
from tailrace_protos.session import LedgerNode, OpenSession


@dataclass
class StoredHere:
    """`StoredSession`, kept here."""

    record: OpenSession
    nonce: str
    is_open: bool = True
    entries: tuple[bytes, ...] = ()
    answers: dict[str, bytes] = field(default_factory=dict)
    names: set[str] = field(default_factory=set)
    answer: bytes | None = None


class SessionsHere:
    """`SessionStore` that shows every call on the screen."""

    def __init__(self, screen: Screen) -> None:
        self._screen = screen
        self._sessions: dict[str, StoredHere] = {}
        self._ids: dict[str, str] = {}

    async def open(self, record: OpenSession, nonce: str, key_hash: str, lifetime_s: float) -> str:
        """See `SessionStore`."""
        kept = self._sessions.setdefault(record.episode_id, StoredHere(record, nonce))
        if kept.nonce == nonce:
            self._ids[key_hash] = record.episode_id
        return kept.nonce

    async def find(self, key_hash: str) -> str:
        """See `SessionStore`."""
        return self._ids.get(key_hash, "")

    async def read(self, session_id: str, num_known: int = 0, answer: str = "") -> StoredHere | None:
        """See `SessionStore`."""
        kept = self._sessions.get(session_id)
        if kept is None:
            return None
        return StoredHere(
            kept.record, kept.nonce, kept.is_open, kept.entries[num_known:],
            answer=kept.answers.get(answer),
        )  # fmt: skip

    async def append(
        self,
        session_id: str,
        nonce: str,
        entry_id: str,
        entries: Sequence[bytes],
        *,
        answer: tuple[str, bytes] = ("", b""),
    ) -> int:
        """See `SessionStore`."""
        kept = self._sessions.get(session_id)
        if kept is None or kept.nonce != nonce or not kept.is_open:
            return -1
        if entry_id not in kept.names:
            kept.names.add(entry_id)
            kept.entries += tuple(entries)
            if answer[0]:
                kept.answers[answer[0]] = answer[1]
            for entry in entries:
                self._show(entry)
        return len(kept.entries)

    async def claim(self, session_id: str, name: str, holder: str, lifetime_s: float) -> str:
        """Whoever asks: there is one gateway here, which knows what it runs."""
        return holder

    async def unclaim(self, session_id: str, name: str, holder: str) -> None:
        """Nothing was claimed."""

    async def finish(self, session_id: str) -> bool:
        """See `SessionStore`."""
        kept = self._sessions.get(session_id)
        if kept is not None:
            kept.is_open = False
        return kept is not None

    async def delete(self, session_id: str, nonce: str = "") -> None:
        """See `SessionStore`."""
        self._sessions.pop(session_id, None)

    def _show(self, entry: bytes) -> None:
        try:
            node = decode(entry, LedgerNode)
        except MalformedMessageError:  # a reward
            return
        self._screen.on_node(node)
