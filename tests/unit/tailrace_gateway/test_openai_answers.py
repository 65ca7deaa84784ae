"""Log-probabilities in the formats of OpenAI's dialects."""

from __future__ import annotations

import msgspec
import numpy as np

from tailrace.chat import ReplyDelta
from tailrace_gateway.core.call import Piece
from tailrace_gateway.core.openai_answers import logprob_entries
from tailrace_gateway.core.openai_completions import logprob_lists


class Letters:
    """Vocabulary in which 0 and 1 have the same text."""

    def token_text(self, token_id: int) -> str:
        return "aab\ufffd"[token_id]


def piece(token_ids: list[int], tops: list[list[int]], values: list[list[float]]) -> Piece:
    return Piece(
        0,
        ReplyDelta(),
        np.array(token_ids, np.int32),
        np.full(len(token_ids), -0.5, np.float32),
        np.array(tops, np.int32),
        np.array(values, np.float32),
    )


def test_a_token_that_cannot_come_has_a_number_that_json_can_say() -> None:
    entries = logprob_entries(Letters().token_text, piece([0], [[0, 2]], [[0.0, -np.inf]]))
    assert entries == msgspec.json.decode(msgspec.json.encode(entries))
    assert [one["logprob"] for one in entries[0]["top_logprobs"]] == [0.0, -9999.0]


def test_part_of_a_character_has_no_bytes() -> None:
    (entry,) = logprob_entries(Letters().token_text, piece([3], [[3]], [[-1.0]]))
    assert entry["bytes"] is entry["top_logprobs"][0]["bytes"] is None
    assert entry["top_logprobs"][0]["token"] == "\ufffd"


def test_of_tokens_that_read_alike_completions_tell_the_likeliest() -> None:
    told = logprob_lists(Letters().token_text, piece([2], [[1, 0]], [[-0.25, -4.0]]), 0)
    assert told["top_logprobs"] == [{"a": -0.25, "b": -0.5}]
