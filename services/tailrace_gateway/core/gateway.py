"""Gateway without a transport: sessions, calls and exports over one policy and one store."""

from functools import partial
from typing import NamedTuple

from tailrace.chat import Renderer
from tailrace.clock import Clock
from tailrace.config.run import ReasoningPolicy
from tailrace.ledger import Ledger
from tailrace_gateway.core.calls import ModelCalls
from tailrace_gateway.core.capture import Capture
from tailrace_gateway.core.claims import Claims
from tailrace_gateway.core.exports import Exporter
from tailrace_gateway.core.prompts import PromptBuilder, Renderings
from tailrace_gateway.core.sampling import PromiseRule, Sampler
from tailrace_gateway.core.sessions import Identity, Sessions
from tailrace_gateway.ports import SessionPolicy, SessionStore


class Renderers(NamedTuple):
    """Renderers of the model: `chat` for conversations, `plain` for replies as plain text."""

    chat: Renderer
    plain: Renderer
    reasoning: ReasoningPolicy


class Gateway(NamedTuple):
    """Parts that routes and handlers use."""

    sessions: Sessions
    calls: ModelCalls
    exporter: Exporter

    @classmethod
    def over(
        cls,
        policy: SessionPolicy,
        store: SessionStore,
        identity: Identity,
        renderers: Renderers,
        clock: Clock,
        *,
        max_concurrent_calls: int,
        promises: PromiseRule,
    ) -> "Gateway":
        """Wire the parts."""
        make_ledger = partial(Ledger, renderers.chat, reasoning=renderers.reasoning)
        sessions = Sessions(identity, store, policy, make_ledger, clock)
        renderings = Renderings(renderers.chat)
        capture = Capture(store)
        sampler = Sampler(policy, renderings, renderers.plain, capture, clock, promises)
        prompter = PromptBuilder(renderings)
        calls = ModelCalls(
            sessions,
            prompter,
            sampler,
            capture,
            Claims(store),
            clock,
            max_concurrent=max_concurrent_calls,
        )
        return cls(sessions, calls, Exporter(sessions, store))
