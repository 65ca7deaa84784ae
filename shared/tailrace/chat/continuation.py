"""Text that a template inserts between a sampled reply and the next one.

The whole conversation is not rendered. Instead, a short conversation is rendered: a sentinel for the
user's message, the reply with sentinels for its texts, then the new messages. The text after the reply
is the text to append. For each shape of such a neighbourhood, one proof shows that this text does not
depend on the length of the conversation and that the text before the reply does not change. A shape
without a proof is remembered and refused with `TemplateNotAppendableError`.
"""

from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from tailrace.chat.model_files import SpecialTokens
from tailrace.chat.pieces import TemplateNotAppendableError
from tailrace.chat.sentinels import (
    EARLIER,
    REASONING,
    USER,
    named,
    nameless_reply,
    reply_span,
    sentinel_message,
    sentinel_reply,
    system_before,
)
from tailrace.chat.template import ChatTemplate, TemplateError
from tailrace_protos.chat import ChatMessage, ToolSchema

_MAX_SHAPES = 1024


class Insertion(NamedTuple):
    """Text after a reply. `end`: the token that closes it; `end_ids`: sampled ids that also close
    it."""

    end: str
    rest: str
    end_ids: frozenset[int]


class _Shape(NamedTuple):
    closing: str  # text between the reply's last text and its end of turn, such as `</tool_call>`
    end: str  # special token with which the template ends the turn; empty: none
    end_ids: frozenset[int]
    keeps_reasoning: bool
    needs_tools: bool  # the inserted text depends on the tools


class _Neighbourhood(NamedTuple):
    """Reply with the messages around it."""

    system: tuple[ChatMessage, ...]
    reply: ChatMessage
    new: tuple[ChatMessage, ...]
    tools: tuple[ToolSchema, ...]

    def key(self) -> tuple[object, ...]:
        """Key that is equal for neighbourhoods that differ only in their texts."""
        return (
            bool(self.system) and self.system[0].role,
            bool(self.reply.content),
            len(self.reply.tool_calls),
            bool(self.tools),
            *((m.role, bool(m.content), len(m.tool_calls), bool(m.reasoning)) for m in self.new),
        )


class Continuations:
    """Insertions of one template; remembers the result of the proof for each shape."""

    def __init__(self, template: ChatTemplate, special: SpecialTokens) -> None:
        self._template = template
        self._special = special
        self._shapes: dict[tuple[object, ...], _Shape | TemplateNotAppendableError] = {}

    def insertion(
        self,
        history: Sequence[ChatMessage],
        new: Sequence[ChatMessage],
        tools: Sequence[ToolSchema] = (),
    ) -> Insertion:
        """Text after the sampled reply `history[-1]`: `new` and a generation prompt."""
        around = self._around(history, new, tools)
        shape = self._shape(around)
        messages = (*around.system, USER, around.reply, *around.new)
        text = self._render(messages, around.tools if shape.needs_tools else (), True)
        _, behind = self._split(text, around.reply)
        before = named(shape.closing, around.reply) + shape.end
        if not behind.startswith(before):
            raise self._refusal(f"it closes a reply with {behind[: len(before)]!r}, not {before!r}")
        return Insertion(shape.end, behind[len(before) :], shape.end_ids)

    def keeps_reasoning(
        self,
        history: Sequence[ChatMessage],
        new: Sequence[ChatMessage],
        tools: Sequence[ToolSchema] = (),
    ) -> bool:
        """True if a new rendering shows the reasoning of `history[-1]` before `new`."""
        return self._shape(self._around(history, new, tools)).keeps_reasoning

    def _around(
        self,
        history: Sequence[ChatMessage],
        new: Sequence[ChatMessage],
        tools: Sequence[ToolSchema],
    ) -> _Neighbourhood:
        writes_calls = bool(self._template.call_text)
        reply = sentinel_reply(history[-1], writes_calls=writes_calls)
        return _Neighbourhood(system_before(history), reply, tuple(new), tuple(tools))

    def _shape(self, around: _Neighbourhood) -> _Shape:
        key = around.key()
        found = self._shapes.get(key)
        if found is None:
            if len(self._shapes) >= _MAX_SHAPES:
                self._shapes.clear()
            found = self._shapes[key] = self._examine(around)
        if isinstance(found, TemplateNotAppendableError):
            raise found
        return found

    def _examine(self, around: _Neighbourhood) -> _Shape | TemplateNotAppendableError:
        reply = around.reply
        new = tuple(sentinel_message(index, message, reply) for index, message in enumerate(around.new))
        try:
            return self._proven(around._replace(reply=nameless_reply(reply), new=new))
        except TemplateNotAppendableError as error:
            return error
        except TemplateError as error:
            return self._refusal(error.reason)

    def _proven(self, around: _Neighbourhood) -> _Shape:
        """Shape of a neighbourhood, after the proof that the module's docstring describes."""
        behind = self._behind((*around.system, USER), around)
        longer = self._behind((*around.system, *EARLIER, USER), around)
        if longer != behind:
            raise self._refusal(f"it inserts {longer!r} where a shorter conversation has {behind!r}")
        alone = self._render((*around.system, USER, around.reply), around.tools, False)
        closing, end, end_ids = self._end(self._split(alone, around.reply)[1], behind, around)
        thoughtful = msgspec.structs.replace(around.reply, reasoning=REASONING)
        text = self._render((*around.system, USER, thoughtful, *around.new), around.tools, True)
        needs_tools = bool(around.tools) and not self._is_independent_of_tools(around, behind)
        return _Shape(closing, end, end_ids, REASONING in text, needs_tools)

    def _is_independent_of_tools(self, around: _Neighbourhood, behind: str) -> bool:
        """True if the inserted text is the same without tools; then they need not be rendered."""
        try:
            return self._behind((*around.system, USER), around._replace(tools=())) == behind
        except TemplateError:
            return False

    def _behind(self, before: tuple[ChatMessage, ...], around: _Neighbourhood) -> str:
        """Text after the reply; refuses the template if the text before the reply changes."""
        asked = self._render(before, around.tools, True)
        text = self._render((*before, around.reply, *around.new), around.tools, True)
        asked_head, found, prompt = asked.partition(USER.content)
        head, _, rest = text.partition(USER.content)
        if not found or head != asked_head:
            raise self._refusal(f"a longer conversation begins with {head!r}, not {asked_head!r}")
        opened, behind = self._split(rest, around.reply)
        if not (opened.startswith(prompt) or prompt.startswith(opened)):
            raise self._refusal(f"a reply begins with {opened!r} but was asked for with {prompt!r}")
        return behind

    def _end(self, alone: str, behind: str, around: _Neighbourhood) -> tuple[str, str, frozenset[int]]:
        """Closing text and end of a reply, from the text after it as the last message and otherwise."""
        shared = self._special.spans(common_beginning(alone, behind))
        if shared:
            start, stop = shared[-1]
            return behind[:start], behind[start:stop], frozenset({self._id(behind[start:stop])})
        own = self._special.spans(alone)
        start = own[-1][0] if own else len(alone) - len(self._plain_close(around, alone))
        if not behind.startswith(alone[:start]):
            raise self._refusal(f"it closes a reply with {behind!r} or {alone!r}")
        stop = self._special.end_of_one_at(behind, start)
        ids = {self._id(behind[start:stop])} if stop > start else set()
        ids |= {self._id(alone[slice(*own[-1])])} if own else set()
        return behind[:start], behind[start:stop], frozenset(ids)

    def _plain_close(self, around: _Neighbourhood, alone: str) -> str:
        """Ordinary text that closes a reply; earlier text in `alone` belongs to a tool call."""
        if not around.reply.tool_calls:
            return alone
        plain = ChatMessage("assistant", "SentinelPlainReply")
        text = self._render((*around.system, USER, plain), around.tools, False)
        close = text.partition(plain.content)[2]
        return close if alone.endswith(close) else ""

    def _split(self, text: str, reply: ChatMessage) -> tuple[str, str]:
        """Texts before and after the reply's sentinels."""
        span = reply_span(text, reply)
        if span is None:
            raise self._refusal("it omits a reply that other messages follow")
        return text[: span[0]], text[span[1] :]

    def _id(self, text: str) -> int:
        return self._special.ids[text]

    def _render(self, messages: Sequence[ChatMessage], tools: Sequence[ToolSchema], asks: bool) -> str:
        return self._template.render(messages, tools, add_generation_prompt=asks)

    def _refusal(self, reason: str) -> TemplateNotAppendableError:
        return TemplateNotAppendableError(self._template.name, f"cannot be appended to: {reason}")


def common_beginning(first: str, second: str) -> str:
    """Longest text with which both texts begin."""
    pairs = enumerate(zip(first, second, strict=False))
    return first[: next((at for at, (a, b) in pairs if a != b), min(len(first), len(second)))]
