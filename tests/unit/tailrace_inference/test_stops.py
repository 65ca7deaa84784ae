"""Stop strings in texts of any tokens, also those that are no text."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
from tokenizers import Tokenizer, decoders, models
from tokenizers.decoders import DecodeStream

from tailrace_inference.engine.stops import StopStrings
from tailrace_protos.generation import FinishReason
from tests.unit.tailrace_inference.harness import VOCAB_SIZE, Client, make_engine, make_model

WORDS = ("<0x0A>", "<0xFF>", "<0xC3>", "<0xA9>", "b", "c", "<0x62>")
NEWLINE, WRONG, FIRST, SECOND, B, C, BYTE_B = range(len(WORDS))


def byte_fallback(*words: str) -> Tokenizer:
    """A tokenizer as that of Llama 2: what is no word is bytes."""
    tokenizer = Tokenizer(models.WordLevel({word: at for at, word in enumerate(words)}, words[0]))
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    return tokenizer


@pytest.mark.parametrize(
    ("ids", "stop", "end"),
    [
        ([NEWLINE, WRONG, B, C], "bc", 4),
        ([NEWLINE, WRONG, WRONG, B, NEWLINE, WRONG, B, C], "bc", 8),
        ([NEWLINE, FIRST, SECOND, B], "\né", 3),
        ([B, WRONG, C, B, C], "bc", 5),
        ([NEWLINE, FIRST, B, B], "bb", 4),
    ],
)
def test_bytes_that_are_no_text_hide_no_stop_string_behind_them(
    ids: list[int], stop: str, end: int
) -> None:
    for num_continued in range(end):
        stops = StopStrings(byte_fallback(*WORDS), ["never", stop], ids[:num_continued])
        found = [stops.push(token_id) for token_id in ids[num_continued:end]]
        assert found == [None] * (end - num_continued - 1) + [stop]


class CountedStream:
    """A stream that counts the tokens that it decodes with each step."""

    decoded: ClassVar[list[int]] = []

    def __init__(self, **settings: Any) -> None:
        self._inner = DecodeStream(**settings)
        self._num_held = 0

    def step(self, tokenizer: Tokenizer, token_id: int) -> str | None:
        self._num_held += 1
        self.decoded.append(self._num_held)
        text: str | None = self._inner.step(tokenizer, token_id)
        self._num_held = self._num_held if text is None else 0
        return text


def test_the_cost_of_a_token_does_not_grow_with_bytes_that_are_no_text(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("tailrace_inference.engine.stops.DecodeStream", CountedStream)
    searched = StopStrings(byte_fallback(*WORDS), ["bc"], [])
    assert {searched.push(FIRST) for _ in range(1000)} == {None}
    assert max(CountedStream.decoded) < 100
    assert [searched.push(token) for token in (B, C)] == [None, "bc"]


def test_calls_that_sample_bytes_and_letters_at_random_go_on_to_their_length() -> None:
    words = [f"<0x{0x60 + 2 * at:02X}>" if at % 2 else chr(0x391 + at) for at in range(VOCAB_SIZE)]
    client = Client(make_engine(make_model(), byte_fallback(*words)))
    asked = [client.ask([at], 60, temperature=2.0, seed=at, stop=("never said",)) for at in range(4)]
    client.finish()
    assert {one.generation.finish_reason for one in asked} == {FinishReason.LENGTH}
