"""Prompts of a call: matches its conversation, or each of its prompts, to the session's ledger."""

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import msgspec

from tailrace.chat import Renderer, TemplateError
from tailrace.chat.long_texts import with_long_texts
from tailrace.ledger import Prompt, Rendering
from tailrace_gateway.core.call import ModelCall
from tailrace_gateway.core.errors import BadRequestError, NotFoundError
from tailrace_gateway.core.response_references import resolved
from tailrace_gateway.core.session import Session
from tailrace_protos.chat import ChatMessage

_MAX_RENDERINGS = 64


class Renderings:
    """Renderers of the model by template arguments of requests; those used last stay in memory."""

    def __init__(self, renderer: Renderer) -> None:
        self._plain = Rendering(renderer)
        self._made: OrderedDict[str, Rendering] = OrderedDict()

    def of(self, args: Mapping[str, Any]) -> Rendering:
        """Return the renderer with these arguments; arguments that the template does not read are
        ignored."""
        read = self._plain.renderer.template_args(args) if args else {}
        if not read:
            return self._plain
        key = msgspec.json.encode(read, order="sorted").decode()
        made = self._made.get(key)
        if made is None:
            try:
                made = Rendering(self._plain.renderer.with_template_args(read), key)
            except TemplateError as error:
                reason = f"chat_template_kwargs: {error}"
                raise BadRequestError(reason, param="chat_template_kwargs") from error
            self._made[key] = made
            if len(self._made) > _MAX_RENDERINGS:
                self._made.popitem(last=False)
        self._made.move_to_end(key)
        return made


class PromptBuilder:
    """Builds prompts; a conversation that cannot be rendered is a `BadRequestError`."""

    def __init__(self, renderings: Renderings) -> None:
        self._renderings = renderings

    async def prompts(self, session: Session, call: ModelCall) -> tuple[Prompt, ...]:
        """Return the prompts and their places in the ledger; a conversation is one prompt.

        The ledger is read in one piece, after long texts were encoded.
        """
        return await with_long_texts(lambda: self._prompts(session, call))

    def _prompts(self, session: Session, call: ModelCall) -> tuple[Prompt, ...]:
        if call.is_token_level:
            encode = self._renderings.of({}).renderer.encode
            ids = [encode(one) if isinstance(one, str) else one for one in call.prompts]
            if not all(map(len, ids)):
                raise BadRequestError("prompt: at least one token is needed", param="prompt")
            return tuple(session.ledger.prepare_tokens(one) for one in ids)
        rendering = self._renderings.of(call.template_args)
        try:
            return (session.ledger.prepare(_conversation(session, call), call.tools, rendering),)
        except TemplateError as error:
            raise BadRequestError(f"messages: {error}", param="messages") from error

    async def prompts_at_hand(self, session: Session, call: ModelCall) -> tuple[Prompt, ...]:
        """Return the prompts from local knowledge alone; none if other replicas' records could change
        them.

        Another replica may have recorded replies that are part of the caller's conversation.
        """
        is_known = not call.previous_id or session.has_call(call.previous_id)
        if call.is_token_level or call.items or session.is_behind or not is_known:
            return ()
        prompts = await self.prompts(session, call)
        return () if any(one.role == "assistant" for one in prompts[0].messages) else prompts


def _conversation(session: Session, call: ModelCall) -> tuple[ChatMessage, ...]:
    """Return the messages after those of the call that the request continues by its id.

    New instructions replace the system message of the conversation.
    """
    new = resolved(session, call.items) if call.items else call.messages
    if not call.previous_id:
        return new
    if not session.has_call(call.previous_id):
        reason = f"previous_response_id: there is no response {call.previous_id!r} in this session"
        raise NotFoundError(reason, param="previous_response_id")
    earlier = tuple(session.ledger.messages(call.previous_id))
    if not call.has_new_system:
        return (*earlier, *new)
    return (new[0], *(earlier[1:] if earlier[0].role == "system" else earlier), *new[1:])
