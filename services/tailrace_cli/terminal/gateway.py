"""Gateway in this process, on a free port, over a local model.

Agents call it by HTTP as they call the gateway of a run. Its policy is local, and its sessions stay in
memory.
"""

import asyncio
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import TracebackType

from tailrace.chat import Renderer
from tailrace.clock import SystemClock
from tailrace.runtime.guard import Guard
from tailrace.sdk.policy import Policy
from tailrace_agents.core.workflow_player import SessionFailedError
from tailrace_cli.experiment import Experiment
from tailrace_cli.terminal.screen import Screen
from tailrace_gateway.adapters.app import GatewayApp
from tailrace_gateway.adapters.model_calls import model_call_routes
from tailrace_gateway.adapters.server import HttpServer, bind, origin_of
from tailrace_gateway.core.errors import ApiError
from tailrace_gateway.core.gateway import Gateway, Renderers
from tailrace_gateway.core.sampling import PromiseRule
from tailrace_gateway.core.sessions import Identity
from tailrace_protos.base import MalformedMessageError, decode
from tailrace_protos.session import ExportSession, LedgerNode, OpenSession, SessionExport, SessionOpened


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

    async def finish(self, session_id: str, key_hash: str = "") -> bool:
        """See `SessionStore`; each id has one session here."""
        kept = self._sessions.get(session_id)
        if kept is not None:
            kept.is_open = False
        return kept is not None

    async def delete(self, session_id: str, nonce: str = "") -> None:
        """See `SessionStore`."""
        self._sessions.pop(session_id, None)

    async def set_aside(self, session_id: str, nonce: str, error: Exception, *found: bytes) -> None:
        """Delete the session and show why; there is no store that could keep its bytes."""
        await self.delete(session_id, nonce)
        self._screen.line(f"the session {session_id!r} was corrupted: {error}")

    def _show(self, entry: bytes) -> None:
        try:
            node = decode(entry, LedgerNode)
        except MalformedMessageError:  # a reward
            return
        self._screen.on_node(node)


_RUN = "terminal"


class _Unleased:
    """`SessionPolicy` of one engine that needs no leases."""

    def __init__(self, policy: Policy) -> None:
        self.generate = policy.generate

    def begin(self, episode_id: str) -> None:
        """Nothing to lease."""

    def end(self, episode_id: str) -> None:
        """Nothing to give back."""


class TerminalGateway:
    """`EpisodeSessions` of a workflow player, and a server while it is entered."""

    def __init__(
        self, experiment: Experiment, renderer: Renderer, policy: Policy, screen: Screen
    ) -> None:
        run, config = experiment.run, experiment.gateway
        identity = Identity(
            _RUN, secrets.token_urlsafe(24), renderer.stop_token_ids, config.session_keep_s,
            config.session_idle_s,
        )  # fmt: skip
        self._gateway = Gateway.over(
            _Unleased(policy),
            SessionsHere(screen),
            identity,
            Renderers(renderer, renderer, run.chat.reasoning),
            SystemClock(),
            max_concurrent_calls=config.max_concurrent_calls,
            promises=PromiseRule(config.on_broken_promise, config.max_asks, config.guided_decoding),
        )
        routes = model_call_routes(self._gateway.calls, renderer, run)
        self._guard = Guard(lambda reason, exit_code: None)
        self._app = GatewayApp(self._gateway.sessions, self._guard, routes, config.max_body_bytes)
        self._host, self._keep_alive_s = config.host, config.keep_alive_s
        self.base_url = ""

    async def __aenter__(self) -> "TerminalGateway":
        listener = bind(self._host, 0)
        self.base_url = f"{origin_of(listener, self._host)}/v1"
        self._server = HttpServer(self._app, listener, self._keep_alive_s)
        serving = self._guard.run("http", self._server.serve())
        self._serving: asyncio.Task[object] = asyncio.create_task(serving, name="http")
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._server.stop()
        await self._server.wait_stopped(self._serving, 1.0)

    async def open(self, request: OpenSession, *, anew: bool) -> SessionOpened:
        """See `EpisodeSessions`."""
        key = await self._gateway.sessions.open(request)
        return SessionOpened(request.episode_id, self.base_url, key)

    async def export(self, request: ExportSession) -> SessionExport:
        """See `EpisodeSessions`."""
        try:
            _, exported = await self._gateway.exporter.export(request)
        except ApiError as error:
            raise SessionFailedError(str(error)) from error
        return exported

    def close(self, opened: SessionOpened) -> None:
        """See `EpisodeSessions`."""
        self._gateway.sessions.forget(opened.session_id)
