"""Prompt of a call: matches its conversation to the session's ledger."""

import numpy as np
from numpy.typing import NDArray

from tailrace.chat import Renderer, TemplateError
from tailrace.ledger import Prompt
from tailrace_gateway.core.call import ModelCall
from tailrace_gateway.core.errors import BadRequestError, NotFoundError
from tailrace_gateway.core.session import Session
from tailrace_protos.chat import ChatMessage


class PromptBuilder:
    """Builds prompts; a conversation that cannot be rendered is a `BadRequestError`."""

    def __init__(self, renderer: Renderer) -> None:
        self._renderer = renderer

    def prompt(self, session: Session, call: ModelCall) -> Prompt:
        """Return the prompt and its place in the ledger."""
        try:
            if call.is_token_level:
                return session.ledger.prepare_tokens(self._token_prompt(call))
            return session.ledger.prepare(_conversation(session, call), call.tools)
        except TemplateError as error:
            raise BadRequestError(f"messages: {error}", param="messages") from error

    def prompt_at_hand(self, session: Session, call: ModelCall) -> Prompt | None:
        """Return the prompt from local knowledge alone; None if other replicas' records could change
        it.

        Another replica may have recorded replies that are part of the caller's conversation.
        """
        is_known = not call.previous_id or session.has_call(call.previous_id)
        if call.is_token_level or session.is_behind or not is_known:
            return None
        prompt = self.prompt(session, call)
        return None if any(one.role == "assistant" for one in prompt.messages) else prompt

    def _token_prompt(self, call: ModelCall) -> NDArray[np.int32]:
        ids = self._renderer.encode(call.prompt_text) if call.prompt_ids is None else call.prompt_ids
        if not len(ids):
            raise BadRequestError("prompt: at least one token is needed", param="prompt")
        return ids


def _conversation(session: Session, call: ModelCall) -> tuple[ChatMessage, ...]:
    """Return the messages after those of the call that the request continues by its id.

    A new system message replaces the system message of the conversation.
    """
    if not call.previous_id:
        return call.messages
    if not session.has_call(call.previous_id):
        reason = f"previous_response_id: there is no response {call.previous_id!r} in this session"
        raise NotFoundError(reason, param="previous_response_id")
    earlier, new = tuple(session.ledger.messages(call.previous_id)), call.messages
    if new and new[0].role == "system" and earlier and earlier[0].role == "system":
        return (new[0], *earlier[1:], *new[1:])
    if new and new[0].role == "system":
        return (new[0], *earlier, *new[1:])
    return (*earlier, *new)
