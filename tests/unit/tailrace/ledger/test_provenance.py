"""Which process sampled which trained token: kept through rows of every kind, and through old files."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tailrace.channel.ports import Address
from tailrace.provenance import join_spans
from tailrace_agents.core.step_tokens import StepTokens
from tailrace_agents.core.tokens import EpisodeTokens
from tailrace_protos.base import (
    MalformedMessageError,
    as_uint8,
    decode,
    encode,
)
from tailrace_protos.control import Lease, split_source
from tailrace_protos.episode import TurnRecord
from tailrace_protos.generation import TokenSpan
from tailrace_protos.session import ExportStyle
from tests.provenance import sources_of
from tests.unit.tailrace.ledger.calls import assistant, new_ledger, sampled, user

TURNS = st.lists(
    st.lists(
        st.tuples(st.sampled_from(["a#1", "a#2", "b"]), st.integers(1, 4)), min_size=1, max_size=3
    ),
    min_size=1,
    max_size=5,
)


def played(tokens: EpisodeTokens, turns: list[list[tuple[str, int]]], broken: set[int]) -> list[str]:
    """Play the turns; the source of every token that is trained."""
    kept: list[str] = []
    number = 0
    for parts in turns:
        opening = np.array([1, 2], np.int32)
        tokens.insert(opening)
        tokens.open_with(opening)
        spans = join_spans(TokenSpan(3, source, count) for source, count in parts)
        sources = [source for source, count in parts for _ in range(count)]
        logprobs = np.full(len(sources), -1.0, np.float32)
        for at, source in enumerate(sources):
            if number in broken:
                logprobs[at] = np.nan
            else:
                kept.append(source)
            number += 1
        tokens.sample(np.zeros(len(sources), np.int32), logprobs, spans)
        tokens.finish_turn(0.0, 0)
    return kept


@settings(max_examples=60, deadline=None)
@given(TURNS, st.sets(st.integers(0, 40), max_size=6))
def test_every_trained_token_of_an_episode_has_the_source_that_sampled_it(
    turns: list[list[tuple[str, int]]], broken: set[int]
) -> None:
    tokens = EpisodeTokens()
    kept = played(tokens, turns, broken)
    row = tokens.row().row
    assert sources_of(row.spans) == kept
    assert int(as_uint8(row.loss_mask).sum()) == len(kept)

    by_turn = StepTokens(1)
    assert played(by_turn, turns, broken) == kept
    rows = by_turn.rows(0.0).rows
    assert [source for row in rows for source in sources_of(row.spans)] == kept
    for step in rows:
        assert len(sources_of(step.spans)) == int(as_uint8(step.loss_mask).sum())


def test_rows_of_a_ledger_know_who_sampled_them_and_skip_what_others_train() -> None:
    ledger = new_ledger()
    first = ledger.prepare([user("hello")])
    said = sampled(assistant("one")).sampled_by("a#1")
    ledger.record(first, said, assistant("one"), "c1")
    second = ledger.prepare([user("hello"), assistant("one"), user("more")])
    more = sampled(assistant("two")).sampled_by("b#1")
    ledger.record(second, more, assistant("two"), "c2")

    (row,) = ledger.rows(ExportStyle.CONCAT)
    expected = (TokenSpan(0, "a#1", said.num_tokens), TokenSpan(0, "b#1", more.num_tokens))
    assert row.spans == expected
    assert [each.spans for each in ledger.rows(ExportStyle.INDIVIDUAL)] == [
        expected[:1],
        expected[1:],
    ]


class _OldSpan(msgspec.Struct, array_like=True):
    policy_version: int
    num_tokens: int


class _OldTurn(msgspec.Struct, tag="turn_record"):
    spans: tuple[_OldSpan, ...]
    turn: int = 0
    observation_ids: bytes = b""
    token_ids: bytes = b""
    inference_logprobs: bytes = b""
    finish_reason: str = "stop"
    reply: str = ""
    reward: float = 0.0
    terminated: bool = False
    truncated: bool = False


def test_a_journal_with_spans_of_another_form_is_refused_by_name() -> None:
    with pytest.raises(MalformedMessageError, match=r"malformed TurnRecord .*spans"):
        decode(encode(_OldTurn((_OldSpan(4, 2),))), TurnRecord)


def test_a_server_that_was_started_again_is_another_source() -> None:
    lease = Lease("g0.1", "inference-0", "s", "z", incarnation="beef")
    source = Address.of(lease).source
    assert split_source(source) == ("inference-0", "beef")
    assert source != Address.of(Lease("g0.1", "inference-0", "s", "z", incarnation="cafe")).source
    assert Address("s0").source == "s0"
    assert split_source("s0") == ("s0", "")
