"""Text of the environment to token ids, appended to what is there; sampled ids to text.

Invariants: ids of the model are never encoded again; the ids that a turn inserts are those of the
whole inserted text encoded at once, so merges across pieces are those of the full rendering.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from tailrace.chat.pieces import ChatPieces, derive_pieces
from tailrace.chat.template import ChatTemplate, TemplateError
from tailrace_protos.weights import ModelCard

# Environments repeat themselves; longer texts are rarely seen twice and would fill the memory.
_MAX_CACHED_TEXTS = 16_384
_MAX_CACHED_CHARS = 512
_MAX_CACHED_REPLY_BYTES = 128


class _EndOfTurn(NamedTuple):
    token_id: int  # -1: the template closes a turn with ordinary text
    text: str


class Renderer:
    """Renders one model's conversations.

    `stop_token_ids`: ids that end an assistant turn. `end_of_turn_id`: the one that the template
    itself puts there (-1 if it closes a turn with ordinary text).
    """

    def __init__(
        self, tokenizer: Tokenizer, pieces: ChatPieces, eos_token_ids: tuple[int, ...]
    ) -> None:
        self._tokenizer = tokenizer
        self._pieces = pieces
        end = _end_of_turn(tokenizer, pieces.between)
        self.end_of_turn_id = end.token_id
        own = () if end.token_id < 0 else (end.token_id,)
        self.stop_token_ids: tuple[int, ...] = tuple(sorted({*own, *eos_token_ids}))
        if not self.stop_token_ids:
            raise TemplateError(
                "of the model card",
                "nothing ends a turn: the template closes it with no special token, and neither "
                "tokenizer_config.json nor the model's config.json names an eos token",
            )
        self._before_first = pieces.opening
        self._before_next = pieces.between.removeprefix(end.text)
        self._cached_encode: Callable[[str], NDArray[np.int32]] = lru_cache(_MAX_CACHED_TEXTS)(
            self._encode
        )
        self._cached_decode: Callable[[bytes], str] = lru_cache(_MAX_CACHED_TEXTS)(self._decode)

    @classmethod
    def from_model_card(cls, card: ModelCard) -> Renderer:
        """Build from the files of the model card; `TemplateError` names what is missing or unusable."""
        files = card.tokenizer_files
        if "tokenizer.json" not in files:
            raise TemplateError(
                "of the model card", "tokenizer.json is missing: save a fast tokenizer beside the model"
            )
        config: dict[str, Any] = json.loads(files.get("tokenizer_config.json", b"{}"))
        tokenizer = Tokenizer.from_str(files["tokenizer.json"].decode())
        special = _special_tokens(config)
        template = _template(files, config, special)
        eos = _eos_token_ids(card, tokenizer, special)
        return cls(tokenizer, derive_pieces(template), eos)

    def observation_ids(self, text: str, first: bool, closed: bool = True) -> NDArray[np.int32]:
        """Ids [o] to insert before the next sample, read-only.

        `first`: the conversation begins with this message. `closed`: the assistant's turn ended with
        `end_of_turn_id`; otherwise that token is inserted too.
        """
        if self._pieces.trims:
            text = text.strip()
        later = self._before_next if closed else self._pieces.between
        before = self._before_first if first else later
        whole = before + text + self._pieces.reply_prompt
        return self._cached_encode(whole) if len(whole) <= _MAX_CACHED_CHARS else self._encode(whole)

    def reply_ids(self, text: str) -> NDArray[np.int32]:
        """Ids [t] of a reply as a model would sample it, with its end of turn; for demonstrations."""
        end = self.end_of_turn_id if self.end_of_turn_id >= 0 else self.stop_token_ids[0]
        return np.append(self._encode(text), np.int32(end))

    def is_closed(self, last_token_id: int) -> bool:
        """Whether a turn whose last sampled token is this one needs no end of turn inserted."""
        return self.end_of_turn_id < 0 or last_token_id == self.end_of_turn_id

    def decode(self, token_ids: NDArray[np.int32]) -> str:
        """Text of sampled ids [t] without special tokens."""
        raw = token_ids.tobytes()
        return self._cached_decode(raw) if len(raw) <= _MAX_CACHED_REPLY_BYTES else self._decode(raw)

    def _encode(self, text: str) -> NDArray[np.int32]:
        ids = np.array(self._tokenizer.encode(text, add_special_tokens=False).ids, dtype=np.int32)
        ids.flags.writeable = False
        return ids

    def _decode(self, raw: bytes) -> str:
        ids = np.frombuffer(raw, dtype=np.int32).tolist()
        return str(self._tokenizer.decode(ids, skip_special_tokens=True))


def _end_of_turn(tokenizer: Tokenizer, between: str) -> _EndOfTurn:
    """The special token that `between` begins with, if it begins with one."""
    ids = tokenizer.encode(between, add_special_tokens=False).ids
    added = tokenizer.get_added_tokens_decoder().get(ids[0]) if ids else None
    if added is None or not added.special or not between.startswith(added.content):
        return _EndOfTurn(-1, "")
    return _EndOfTurn(ids[0], added.content)


def _special_tokens(config: dict[str, Any]) -> dict[str, str]:
    """`bos_token` and the like, which the config writes as text or as an object with `content`."""
    tokens = {}
    for key, value in config.items():
        content = value.get("content") if isinstance(value, dict) else value
        if key.endswith("_token") and isinstance(content, str):
            tokens[key] = content
    return tokens


def _template(files: dict[str, bytes], config: dict[str, Any], special: dict[str, str]) -> ChatTemplate:
    if "chat_template.jinja" in files:
        return ChatTemplate(files["chat_template.jinja"].decode(), special, "chat_template.jinja")
    source = config.get("chat_template")
    if isinstance(source, list):  # several named templates
        source = {entry["name"]: entry["template"] for entry in source}.get("default")
    if not isinstance(source, str):
        raise TemplateError(
            "of the model card",
            "the model has none: put chat_template.jinja, or the key chat_template of "
            "tokenizer_config.json, beside the model",
        )
    return ChatTemplate(source, special, "of tokenizer_config.json")


def _eos_token_ids(card: ModelCard, tokenizer: Tokenizer, special: dict[str, str]) -> tuple[int, ...]:
    """Ends of text by the tokenizer and by the model's config."""
    ids: list[int] = []
    if "eos_token" in special:
        token_id = tokenizer.token_to_id(special["eos_token"])
        ids += [] if token_id is None else [token_id]
    of_model = json.loads(card.config_json).get("eos_token_id") if card.config_json else None
    if isinstance(of_model, int):
        ids.append(of_model)
    elif isinstance(of_model, list):
        ids.extend(of_model)
    return tuple(ids)
