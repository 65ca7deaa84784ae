"""Guided replies: tokens that the grammar of a call allows next, found by llguidance.

Invariants: a stop id of the call is allowed exactly when its reply is whole; special tokens are allowed
only where the guide names their text; a matcher has consumed all sampled tokens of its call, those of
other servers included.
"""

import json
from collections.abc import Callable, Iterable
from pathlib import Path

import msgspec
import numpy as np
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper
from numpy.typing import NDArray
from tokenizers import Tokenizer

from tailrace_inference.core.guides import lark_grammar
from tailrace_inference.core.requests import InvalidRequestError
from tailrace_protos.generation import Guide

_MAX_SPECIALS = 8  # kept tokenizers of llguidance, one for each set of special tokens in guides


class GuideMatcher:
    """State of one guided reply."""

    def __init__(self, matcher: LLMatcher, vocab_size: int, stop_ids: Iterable[int]) -> None:
        self._matcher = matcher
        self._vocab_size = vocab_size
        self._stop_ids = list(stop_ids)
        self.is_ended = False  # by a stop id
        self.allowed: NDArray[np.bool_] = np.empty(0, np.bool_)
        """Tokens [V] that may come next. None of them: the vocabulary cannot continue the reply."""
        self._find_allowed()

    def consume(self, token_id: int) -> bool:
        """Takes the next token of the reply; a stop id ends it. False if it does not fit."""
        if self.is_ended or not self.allowed[token_id]:
            return False
        if token_id in self._stop_ids:
            self.is_ended = True
            return True
        self._matcher.consume_token(token_id)
        self._find_allowed()
        return True

    def fitting(self, token_ids: list[int]) -> list[int]:
        """The first of `token_ids` that may come next, one after the other; nothing is consumed."""
        count = 0
        while count < len(token_ids) and self.consume(token_ids[count]):
            count += 1
        self.rollback(count)
        return token_ids[:count]

    def rollback(self, count: int) -> None:
        """Takes the last `count` consumed tokens back."""
        if count and self.is_ended:
            self.is_ended = False
            count -= 1
        if count:
            self._matcher.rollback(count)
            self._find_allowed()

    def packed(self) -> NDArray[np.int32]:
        """`allowed` as bits of int32, the first token lowest; all ones in the bits behind the last."""
        padded = np.ones(-(-self._vocab_size // 32) * 32, np.bool_)
        padded[: self._vocab_size] = self.allowed
        return np.packbits(padded, bitorder="little").view(np.int32)

    def _find_allowed(self) -> None:
        matcher = self._matcher
        self.allowed = np.zeros(self._vocab_size, np.bool_)
        is_whole = matcher.is_accepting()
        if not matcher.is_stopped():
            bits = np.frombuffer(matcher.compute_bitmask(), np.uint8)
            known = np.unpackbits(bits, bitorder="little", count=min(len(bits) * 8, self._vocab_size))
            self.allowed[: len(known)] = known
        self.allowed[self._stop_ids] = is_whole and not matcher.is_error()


class GuideSpec(msgspec.Struct, frozen=True, omit_defaults=True):
    """A guided call as text, for the processes of an engine."""

    guide: Guide
    stop_ids: tuple[int, ...]
    continued_ids: tuple[int, ...] = ()

    def text(self) -> str:
        """JSON."""
        return msgspec.json.encode(self).decode()


def read_guides(folder: Path, vocab_size: int) -> "Guides":
    """`Guides` of the tokenizer in a model's folder."""
    return Guides(Tokenizer.from_file(str(folder / "tokenizer.json")), vocab_size)


class Guides:
    """Makes matchers for the vocabulary of one model."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        self._tokenizer, self._vocab_size = tokenizer, vocab_size
        self._token_bytes = token_bytes(tokenizer)
        added = tokenizer.get_added_tokens_decoder()
        self._special = {each.content: token for token, each in added.items() if each.special}
        self._tokenizers: dict[frozenset[int], LLTokenizer] = {}

    def matcher(
        self, guide: Guide, stop_ids: Iterable[int], continued_ids: Iterable[int]
    ) -> GuideMatcher:
        """Matcher of a reply that begins with `continued_ids`; raises `InvalidRequestError`."""
        try:
            grammar = lark_grammar(guide)
        except (ValueError, RecursionError) as error:  # the latter: nested too deeply
            raise InvalidRequestError(f"guide: {error}") from error
        matcher = LLMatcher(self._tokenizer_of(guide), grammar, log_level=0)
        if matcher.is_error():
            raise InvalidRequestError(f"guide: {matcher.get_error()[:400]}")
        made = GuideMatcher(matcher, self._vocab_size, stop_ids)
        if not all(made.consume(token_id) for token_id in continued_ids) or made.is_ended:
            raise InvalidRequestError("guide: the tokens so far do not fit it")
        if not made.allowed.any():
            raise InvalidRequestError("guide: no token of this vocabulary begins such a reply")
        return made

    def matcher_of(self, spec: str) -> GuideMatcher:
        """Matcher of the JSON of a `GuideSpec`."""
        read = msgspec.json.decode(spec, type=GuideSpec)
        return self.matcher(read.guide, read.stop_ids, read.continued_ids)

    def _tokenizer_of(self, guide: Guide) -> LLTokenizer:
        """The tokenizer in which special tokens of the guide's own texts are ordinary text."""
        calls = guide.calls
        own = [guide.thought_begin, guide.thought_end]
        own += [] if calls is None else [calls.begin, calls.end, calls.separator]
        named = frozenset(
            token for text, token in self._special.items() if any(text in one for one in own)
        )
        if named not in self._tokenizers:
            if len(self._tokenizers) == _MAX_SPECIALS:
                self._tokenizers.pop(next(iter(self._tokenizers)))
            special = sorted(set(self._special.values()) - named)
            wrapper = TokenizerWrapper(_Vocabulary(self._tokenizer, self._token_bytes, special))
            self._tokenizers[named] = LLTokenizer(wrapper)
        return self._tokenizers[named]


class _Vocabulary:
    """A tokenizer as llguidance wants it, with an end-of-sequence token of its own at the end."""

    def __init__(self, tokenizer: Tokenizer, known: list[bytes], special: list[int]) -> None:
        self._tokenizer = tokenizer
        self.tokens = [*known, b"<end>"]
        self.eos_token_id = self.bos_token_id = len(known)
        self.special_token_ids = [*special, self.eos_token_id]
        self._ids = {each: token for token, each in enumerate(known) if token not in special}
        self._longest = max(map(len, known))

    def __call__(self, text: bytes) -> list[int]:
        """Tokens of a text that the grammar leaves no choice about."""
        ids: list[int] = self._tokenizer.encode(text.decode(), add_special_tokens=False).ids
        return ids if b"".join(self.tokens[token] for token in ids) == text else self._greedy(text)

    def _greedy(self, text: bytes) -> list[int]:
        """The longest token at each place, for tokenizers that add or lose text; up to a gap."""
        ids, place = [], 0
        while place < len(text):
            sizes = range(min(self._longest, len(text) - place), 0, -1)
            size = next((size for size in sizes if text[place : place + size] in self._ids), 0)
            if not size:
                break
            ids.append(self._ids[text[place : place + size]])
            place += size
        return ids


def token_bytes(tokenizer: Tokenizer) -> list[bytes]:
    """Bytes that each token adds to a reply; tokens that add none, or are unknown, have none."""
    read = _reader(_decoder_types(json.loads(tokenizer.to_str()).get("decoder")))
    added = tokenizer.get_added_tokens_decoder()
    return [
        added[token_id].content.encode()
        if token_id in added
        else read(tokenizer.id_to_token(token_id) or "")
        for token_id in range(tokenizer.get_vocab_size(with_added_tokens=True))
    ]


def _reader(decoders: set[object]) -> Callable[[str], bytes]:
    """Reads the text of a token in the vocabulary as the decoders of its tokenizer do."""
    if "ByteLevel" in decoders:
        letters = _byte_letters()
        return lambda text: bytes(letters[char] for char in text if char in letters)
    has_bytes, has_spaces = "ByteFallback" in decoders, bool(decoders & {"Metaspace", "Replace"})

    def read(text: str) -> bytes:
        if has_bytes and len(text) == 6 and text.startswith("<0x"):
            return bytes([int(text[3:5], 16)])
        return (text.replace("\u2581", " ") if has_spaces else text).encode()

    return read


def _decoder_types(decoder: dict[str, object] | None) -> set[object]:
    if decoder is None:
        return set()
    inner = decoder.get("decoders")
    parts = inner if isinstance(inner, list) else []
    return {decoder.get("type")}.union(*(_decoder_types(each) for each in parts))


def _byte_letters() -> dict[str, int]:
    """Letters by which byte-level tokenizers write bytes: printable ones as themselves."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + n): byte for n, byte in enumerate(others)}
