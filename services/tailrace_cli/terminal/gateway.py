"""The gateway's own routes in this process, on a free port, over a local model.

Agents call it by HTTP as they call the gateway of a run; only what lies behind is local: the policy,
and sessions in memory.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from types import TracebackType

from tailrace.channel.generation import Generation
from tailrace.chat import Renderer
from tailrace.clock import SystemClock
from tailrace.ledger import Ledger
from tailrace.runtime.guard import Guard
from tailrace.sdk.policy import OnChunk, Policy
from tailrace_agents.core.workflow_player import SessionFailedError
from tailrace_cli.experiment import Experiment
from tailrace_cli.terminal.screen import Screen
from tailrace_gateway.adapters.http.chat import chat_routes
from tailrace_gateway.adapters.http.completions import completion_routes
from tailrace_gateway.adapters.http.door import Door
from tailrace_gateway.adapters.http.messages import message_routes
from tailrace_gateway.adapters.http.models import model_routes
from tailrace_gateway.adapters.http.responses import response_routes
from tailrace_gateway.adapters.server import HttpServer, bind, ended
from tailrace_gateway.core.calls import Calls
from tailrace_gateway.core.capture import Capture
from tailrace_gateway.core.errors import ApiError
from tailrace_gateway.core.exports import Exporter
from tailrace_gateway.core.prompts import Prompter
from tailrace_gateway.core.sampling import Sampler
from tailrace_gateway.core.sessions import Identity, Sessions
from tailrace_protos.base import Int32Bytes, MalformedMessageError, decode
from tailrace_protos.generation import SamplingParams
from tailrace_protos.session import (
    ExportSession,
    LedgerNode,
    OpenSession,
    SessionExport,
    SessionOpened,
)

_RUN = "terminal"


class _Unleased:
    """`SessionPolicy` of one engine that needs no leases."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy

    def begin(self, episode_id: str, predicted_tokens: int) -> None:
        """Nothing to lease."""

    def end(self, episode_id: str) -> None:
        """Nothing to give back."""

    async def generate(
        self,
        prompt_ids: Int32Bytes,
        max_new_tokens: int,
        sampling: SamplingParams,
        *,
        episode_id: str,
        turn: int,
        on_chunk: OnChunk | None = None,
    ) -> Generation:
        """See `Policy`."""
        return await self._policy.generate(
            prompt_ids, max_new_tokens, sampling, episode_id=episode_id, turn=turn, on_chunk=on_chunk
        )


@dataclass
class _Stored:
    """`StoredSession`, kept here."""

    record: OpenSession
    nonce: str
    is_open: bool = True
    entries: tuple[bytes, ...] = ()
    answers: dict[str, bytes] = field(default_factory=dict)
    names: set[str] = field(default_factory=set)
    answer: bytes | None = None


class _Memory:
    """`SessionStore` that shows every call on the screen."""

    def __init__(self, screen: Screen) -> None:
        self._screen = screen
        self._sessions: dict[str, _Stored] = {}
        self._ids: dict[str, str] = {}

    async def open(self, record: OpenSession, nonce: str, key_hash: str, lifetime_s: float) -> str:
        """See `SessionStore`."""
        kept = self._sessions.setdefault(record.episode_id, _Stored(record, nonce))
        if kept.nonce == nonce:
            self._ids[key_hash] = record.episode_id
        return kept.nonce

    async def find(self, key_hash: str) -> str:
        """See `SessionStore`."""
        return self._ids.get(key_hash, "")

    async def read(self, session_id: str, num_known: int = 0, answer: str = "") -> _Stored | None:
        """See `SessionStore`."""
        kept = self._sessions.get(session_id)
        if kept is None:
            return None
        return _Stored(
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

    async def finish(self, session_id: str) -> bool:
        """See `SessionStore`."""
        kept = self._sessions.get(session_id)
        if kept is not None:
            kept.is_open = False
        return kept is not None

    async def delete(self, session_id: str) -> None:
        """See `SessionStore`."""
        self._sessions.pop(session_id, None)

    def _show(self, entry: bytes) -> None:
        try:
            node = decode(entry, LedgerNode)
        except MalformedMessageError:  # a reward
            return
        self._screen.on_node(node)


class TerminalGateway:
    """`Sessions` of a workflow player, and a server while it is entered."""

    def __init__(
        self, experiment: Experiment, renderer: Renderer, policy: Policy, screen: Screen
    ) -> None:
        run, config = experiment.run, experiment.gateway
        clock, store = SystemClock(), _Memory(screen)
        unleased = _Unleased(policy)
        identity = Identity(
            _RUN, secrets.token_urlsafe(24), renderer.stop_token_ids, config.session_keep_s,
            config.session_idle_s,
        )  # fmt: skip
        ledger = partial(Ledger, renderer, reasoning=run.chat.reasoning)
        self._sessions = Sessions(identity, store, unleased, ledger, clock)
        sampler = Sampler(unleased, renderer, renderer, Capture(store), clock)
        calls = Calls(
            self._sessions,
            Prompter(renderer),
            sampler,
            clock,
            max_concurrent=config.max_concurrent_calls,
        )
        self._exporter = Exporter(self._sessions, store)
        self._store = store
        routes = [
            *chat_routes(calls, renderer),
            *completion_routes(calls, renderer),
            *response_routes(calls, renderer),
            *message_routes(calls),
            *model_routes(run.pretrain or run.exp_name),
        ]
        self._guard = Guard(lambda reason, exit_code: None)
        self._door = Door(self._sessions, self._guard, routes, config.max_body_bytes)
        self._host, self._keep_alive_s = config.host, config.keep_alive_s
        self.base_url = ""

    async def __aenter__(self) -> TerminalGateway:
        listener = bind(self._host, 0)
        self.base_url = f"http://{self._host}:{listener.getsockname()[1]}/v1"
        self._server = HttpServer(self._door, listener, self._keep_alive_s)
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
        await ended(self._serving, 1.0, self._server)

    async def open(self, request: OpenSession, *, anew: bool) -> SessionOpened:
        """See `Sessions`."""
        key = await self._sessions.open(request)
        return SessionOpened(request.episode_id, self.base_url, key)

    async def export(self, request: ExportSession) -> SessionExport:
        """See `Sessions`."""
        try:
            _, exported = await self._exporter.export(request)
        except ApiError as error:
            raise SessionFailedError(str(error)) from error
        return exported

    def close(self, session_id: str) -> None:
        """See `Sessions`."""
        self._sessions.forget(session_id)
