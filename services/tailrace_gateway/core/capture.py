"""What was sampled goes into the ledger and, in one step with the answer's record, into the log.

A call that cannot be captured in time is answered all the same; its nodes are masked, so that nobody
trains on what another replica cannot know of.
"""

from __future__ import annotations

from collections.abc import Sequence

from tailrace.channel.generation import Generation
from tailrace.chat import ParsedReply
from tailrace.ledger import Prompt
from tailrace.log import get_logger
from tailrace_gateway import metrics
from tailrace_gateway.core.call import Completion
from tailrace_gateway.core.recorded import answer_of
from tailrace_gateway.core.session import Session
from tailrace_gateway.ports import SessionStore, StoreLostError
from tailrace_protos.base import encode

log = get_logger(__name__)


class Capture:
    """Captures the calls of sessions."""

    def __init__(self, store: SessionStore) -> None:
        self._store = store

    async def keep(
        self,
        session: Session,
        prompt: Prompt,
        sampled: Sequence[tuple[Generation, ParsedReply]],
        completion: Completion,
        name: str,
    ) -> None:
        """Record a finished call; never fails it."""
        nodes = [
            session.record_call(prompt, generation, parsed, choice.completion_id)
            for (generation, parsed), choice in zip(sampled, completion.choices, strict=True)
        ]
        completion_id = completion.opening.completion_id
        try:
            length = await self._store.append(
                session.session_id,
                session.nonce,
                completion_id,
                [encode(node) for node in nodes],
                answer=(name, answer_of(completion)),
            )
        except StoreLostError as error:
            self._mask(session, completion, f"not captured: {error}")
            return
        if length < 0:
            session.is_open = False
            self._mask(session, completion, "the session was over")
        else:
            session.appended(len(nodes), length)

    def _mask(self, session: Session, completion: Completion, reason: str) -> None:
        metrics.UNCAPTURED.inc()
        log.warning("call not captured", session_id=session.session_id, reason=reason)
        for choice in completion.choices:
            session.ledger.mask(choice.completion_id, reason)
