"""Renderer: conversations to token ids, turn by turn; sampled ids to text and messages.

Invariants: sampled ids are never encoded again. The text that a turn inserts is encoded as a whole, so
that tokens merge across its pieces as in a full rendering.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tailrace.chat.continuation import Continuations, common_beginning
from tailrace.chat.long_texts import encode_or_defer
from tailrace.chat.model_files import ChatModel, SpecialTokens, read_chat_model
from tailrace.chat.parsers import load_parsers
from tailrace.chat.pieces import ChatPieces, TemplateNotAppendableError, derive_pieces
from tailrace.chat.reasoning import ThoughtMarks
from tailrace.chat.reply import ParsedReply, ReplyDelta, ReplyStream
from tailrace.chat.sentinels import USER, reply_span, sentinel_reply
from tailrace.chat.template import ChatTemplate, TemplateError
from tailrace.chat.text_stream import StopText, TokenText
from tailrace.chat.tool_parsers import TOOL_PARSERS, CallForm
from tailrace.config.run import ChatArgs
from tailrace_protos.chat import ChatMessage, ToolCall, ToolSchema
from tailrace_protos.weights import ModelCard

_DEFAULTS = ChatArgs()
# Environments repeat short texts. Longer texts rarely occur twice and would fill the memory.
_MAX_CACHED_TEXTS = 16_384
_MAX_CACHED_CHARS = 512
_MAX_CACHED_REPLY_BYTES = 128
# The episodes of a group open with the same text, often a long one, at about the same time.
_MAX_CACHED_OPENINGS = 128
_MAX_CACHED_OPENING_CHARS = 65_536

_PROBE_CALL = ToolCall("sentinel1", "probe", "{}")
_PROBE_REPLIES = (
    ChatMessage("assistant", "SentinelReply"),
    ChatMessage("assistant", tool_calls=(_PROBE_CALL,)),
)


class Renderer:
    """Renders one model's conversations and reads its replies.

    `stop_token_ids`: ids that end an assistant turn. `end_of_turn_id`: the id that the template writes
    after a plain reply (-1 if it closes a turn with ordinary text).
    """

    def __init__(self, model: ChatModel, chat: ChatArgs = _DEFAULTS) -> None:
        self._model = model
        self._chat = chat
        self._tokenizer = model.tokenizer
        self._template = model.template
        self._pieces, self._refusal = _pieces_or_refusal(model.template)
        special = SpecialTokens(model.tokenizer)
        self._continuations = Continuations(model.template, special)
        self._find_ends(special, model.eos_token_ids)
        self._cached_encode: Callable[[str], NDArray[np.int32]] = lru_cache(_MAX_CACHED_TEXTS)(
            self._encode
        )
        self._cached_opening: Callable[[str], NDArray[np.int32]] = lru_cache(_MAX_CACHED_OPENINGS)(
            self._encode
        )
        self._cached_decode: Callable[[bytes], str] = lru_cache(_MAX_CACHED_TEXTS)(self._decode)
        self._tool_parser, self._reasoning_parser = load_parsers(chat).selected(model.template, special)
        kept = {*self._tool_parser.special_texts, *self._reasoning_parser.special_texts}
        self._dropped_ids = frozenset(
            token_id for text, token_id in special.ids.items() if text not in kept
        )
        self._marker_ids = frozenset(one for one, text in special.texts.items() if text in kept)
        self._prompt = self._template.render((USER,), add_generation_prompt=True)

    def _find_ends(self, special: SpecialTokens, eos_token_ids: tuple[int, ...]) -> None:
        ends = find_turn_ends(self._template, special, self._continuations)
        between = self._pieces.between if self._pieces else ""
        end_text = between[: special.end_of_one_at(between, 0)]
        own = {special.ids[end_text]} if end_text else set()
        self.end_of_turn_id = min(own) if self._pieces and own else ends.plain_id
        self._closing_ids = ends.closing_ids | own
        self.stop_token_ids: tuple[int, ...] = tuple(sorted({*ends.stop_ids, *own, *eos_token_ids}))
        self._end_ids = frozenset(self.stop_token_ids)
        if not self.stop_token_ids:
            raise TemplateError(
                "of the model card",
                "nothing ends a turn: the template closes it with no special token, and neither "
                "tokenizer_config.json nor the model's config.json names an eos token",
            )
        self._before_first = self._pieces.opening if self._pieces else ""
        self._before_next = between[len(end_text) :]

    @classmethod
    def from_model_card(cls, card: ModelCard, chat: ChatArgs = _DEFAULTS) -> "Renderer":
        """Builds from the files of the model card.

        Raises `TemplateError` for a missing or unusable file, `ConfigError` as `load_parsers` does.
        """
        return cls(read_chat_model(card, chat.template_args), chat)

    def template_args(self, args: Mapping[str, Any]) -> dict[str, Any]:
        """Selects the variables that change what the template renders."""
        return self._template.read_by(args)

    def with_template_args(self, args: Mapping[str, Any]) -> "Renderer":
        """Returns a renderer whose template has these variables; raises `TemplateError`."""
        model = self._model._replace(template=self._template.with_names(args))
        return Renderer(model, self._chat)

    def require_plain_turns(self) -> None:
        """Raises `TemplateNotAppendableError` if `observation_ids` would."""
        if self._refusal is not None:
            raise self._refusal

    def observation_ids(self, text: str, first: bool, closed: bool = True) -> NDArray[np.int32]:
        """Ids [o] to insert before the next sample, read-only.

        `first`: the conversation begins with this message. `closed`: the assistant's turn ended with
        `end_of_turn_id`; otherwise that token is inserted too. Raises `TemplateNotAppendableError` if
        the template does not insert the same text around every user message.
        """
        pieces = self._pieces
        if pieces is None:
            assert self._refusal is not None
            raise self._refusal
        if pieces.trims:
            text = text.strip()
        later = self._before_next if closed else pieces.between
        before = self._before_first if first else later
        whole = before + text + pieces.reply_prompt
        return self._cached_encode(whole) if len(whole) <= _MAX_CACHED_CHARS else self._encode(whole)

    def opening_ids(
        self, messages: Sequence[ChatMessage], tools: Sequence[ToolSchema] = ()
    ) -> NDArray[np.int32]:
        """Ids [o] of a new conversation with the prompt for a reply, read-only."""
        text = self._template.render(messages, tools, add_generation_prompt=True)
        is_short = len(text) <= _MAX_CACHED_OPENING_CHARS
        return self._cached_opening(text) if is_short else self._encode(text)

    def continuation_ids(
        self,
        history: Sequence[ChatMessage],
        new: Sequence[ChatMessage],
        tools: Sequence[ToolSchema] = (),
        *,
        closed: bool,
    ) -> NDArray[np.int32]:
        """Ids [o] to append after the sampled reply `history[-1]`, read-only: `new` and the prompt for
        the next reply. `closed`: `is_closed` of the reply's last token.

        Raises `TemplateNotAppendableError` if the template would change earlier text.
        """
        inserted = self._continuations.insertion(history, new, tools)
        return self._encode(inserted.rest if closed else inserted.end + inserted.rest)

    def keeps_reasoning(
        self,
        history: Sequence[ChatMessage],
        new: Sequence[ChatMessage],
        tools: Sequence[ToolSchema] = (),
    ) -> bool:
        """True if the template shows the reasoning of the reply `history[-1]` before `new`."""
        return self._continuations.keeps_reasoning(history, new, tools)

    def reply_ids(self, text: str) -> NDArray[np.int32]:
        """Ids [t] of a reply with its end of turn, as a model would sample them; for demonstrations."""
        end = self.end_of_turn_id if self.end_of_turn_id >= 0 else self.stop_token_ids[0]
        return np.append(self._encode(text), np.int32(end))

    def supervised_rows(
        self,
        messages: Sequence[ChatMessage],
        tools: Sequence[ToolSchema],
        is_trained: Sequence[bool],
    ) -> list[tuple[NDArray[np.int32], NDArray[np.uint8]]]:
        """Ids [T] and loss mask [T] of given replies, with their ends of turn; for supervised steps.

        One row as long as the template appends, a new one where it changes earlier text.
        """
        rows: list[tuple[str, list[NDArray[np.int32]], list[NDArray[np.uint8]]]] = []
        for index, message in enumerate(messages):
            if message.role != "assistant":
                continue
            before = self._template.render(messages[:index], tools, add_generation_prompt=True)
            whole = self._template.render(messages[: index + 1], tools, add_generation_prompt=False)
            if not whole.startswith(before):  # it drops a part of its prompt from past replies
                before = common_beginning(before, whole)
            if not rows or not before.startswith(rows[-1][0]):
                rows.append(("", [], []))
            text, ids, mask = rows.pop()
            inserted, reply = self._encode(before[len(text) :]), self._encode(whole[len(before) :])
            ends = np.flatnonzero(np.isin(reply, self.stop_token_ids))
            end = int(ends[0]) + 1 if len(ends) else len(reply)
            own = np.zeros(len(reply), np.uint8)
            own[:end] = is_trained[index]
            rows.append(
                (whole, [*ids, inserted, reply], [*mask, np.zeros(len(inserted), np.uint8), own])
            )
        joined = [(np.concatenate(ids), np.concatenate(mask)) for _, ids, mask in rows]
        return [row for row in joined if row[1].any()]

    def is_closed(self, last_token_id: int) -> bool:
        """True if a turn with this last sampled token needs no inserted end of turn."""
        return self.end_of_turn_id < 0 or last_token_id in self._closing_ids

    def decode(self, token_ids: NDArray[np.int32]) -> str:
        """Text of sampled ids [t] without special tokens."""
        raw = token_ids.tobytes()
        return self._cached_decode(raw) if len(raw) <= _MAX_CACHED_REPLY_BYTES else self._decode(raw)

    def encode(self, text: str) -> NDArray[np.int32]:
        """Ids [t] of a bare text, read-only; nothing is added to it."""
        return self._encode(text)

    def token_text(self, token_id: int) -> str:
        """Text of one token, special tokens included; U+FFFD stands for a part of a character."""
        return str(self._tokenizer.decode([token_id], skip_special_tokens=False))

    def parse_reply(
        self,
        token_ids: NDArray[np.int32],
        tools: Sequence[ToolSchema] = (),
        *,
        stop: Sequence[str] = (),
        id_seed: str = "",
    ) -> ParsedReply:
        """Message in sampled ids [t]; raises nothing, whatever a model wrote. See `reply_stream`."""
        stream = self.reply_stream(tools, stop=stop, id_seed=id_seed)
        delta = stream.feed(token_ids)
        parsed = stream.finish()
        rest = ReplyDelta(delta.content + parsed.rest.content, delta.reasoning + parsed.rest.reasoning)
        return parsed._replace(rest=rest)

    def reply_stream(
        self,
        tools: Sequence[ToolSchema] = (),
        *,
        stop: Sequence[str] = (),
        stop_token_ids: Sequence[int] = (),
        id_seed: str = "",
        finds_calls: bool = True,
    ) -> ReplyStream:
        """Reads one reply while it is sampled.

        `tools` gives the types of arguments. `stop` and `stop_token_ids`: the request's stops, which
        are not part of the content, except for the markers of calls and thoughts. `id_seed`: seed of
        the ids of tool calls, such as the completion's id.
        Without `finds_calls`, tool calls stay in the content as text.
        """
        ends = self._end_ids | (frozenset(stop_token_ids) - self._marker_ids)
        return ReplyStream(
            TokenText(self._tokenizer, self._dropped_ids, ends),
            StopText(stop),
            self._reasoning_parser.splitter(self._prompt),
            self._tool_parser if finds_calls else TOOL_PARSERS["none"],
            tools,
            id_seed,
        )

    @property
    def call_form(self) -> CallForm | None:
        """Form of a required tool call. None: replies cannot be bound to it."""
        return self._tool_parser.call_form

    @property
    def thoughts(self) -> ThoughtMarks | None:
        """Markers of thoughts before an answer. None: replies with thoughts cannot be guided."""
        return self._reasoning_parser.thoughts(self._prompt)

    def _encode(self, text: str) -> NDArray[np.int32]:
        return encode_or_defer(text, self._encode_now)

    def _encode_now(self, text: str) -> NDArray[np.int32]:
        # Same ids as `encode`, without the tokens' offsets in the text: one third cheaper.
        (encoding,) = self._tokenizer.encode_batch_fast([text], add_special_tokens=False)
        ids = np.array(encoding.ids, dtype=np.int32)
        ids.flags.writeable = False
        return ids

    def _decode(self, raw: bytes) -> str:
        ids = np.frombuffer(raw, dtype=np.int32).tolist()
        return str(self._tokenizer.decode(ids, skip_special_tokens=True))


def _pieces_or_refusal(
    template: ChatTemplate,
) -> tuple[ChatPieces | None, TemplateNotAppendableError | None]:
    """Pieces that environments need; a template without them still renders conversations."""
    try:
        return derive_pieces(template), None
    except TemplateNotAppendableError as error:
        return None, error


class TurnEnds(NamedTuple):
    """Tokens that end an assistant's turn, found after replies that the template renders."""

    stop_ids: frozenset[int]  # a model that samples one of them has ended its turn
    closing_ids: frozenset[int]  # a turn with such a last token needs no inserted end of turn
    plain_id: int  # the one after a reply without tool calls; -1: none


def find_turn_ends(
    template: ChatTemplate, special: SpecialTokens, continuations: Continuations
) -> TurnEnds:
    """Finds the ends of a plain reply and of a reply with a tool call."""
    replies = _PROBE_REPLIES if template.call_text else _PROBE_REPLIES[:1]
    last_ids = [_last_special(template, special, reply) for reply in replies]
    stop_ids = frozenset(token_id for token_id in last_ids if token_id >= 0)
    closing_ids = stop_ids.union(*(_closing(continuations, reply) for reply in replies))
    return TurnEnds(stop_ids, closing_ids, last_ids[0])


def _last_special(template: ChatTemplate, special: SpecialTokens, reply: ChatMessage) -> int:
    """Last special token of a conversation that ends with the reply, or -1."""
    shape = sentinel_reply(reply, writes_calls=True)
    try:
        text = template.render((USER, shape), add_generation_prompt=False)
    except TemplateError:
        return -1
    span = reply_span(text, shape)
    behind = text[span[1] :] if span else ""
    spans = special.spans(behind)
    return special.ids[behind[slice(*spans[-1])]] if spans else -1


def _closing(continuations: Continuations, reply: ChatMessage) -> frozenset[int]:
    answer = ChatMessage("tool", "SentinelResult", tool_call_id=_PROBE_CALL.id, name=_PROBE_CALL.name)
    new = answer if reply.tool_calls else ChatMessage("user", "SentinelNext")
    try:
        return continuations.insertion((USER, reply), (new,)).end_ids
    except TemplateNotAppendableError:
        return frozenset()
