"""Which process sampled which trained token: kept through rows of every kind, and through old files."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tailrace.channel.generation import Generation
from tailrace.channel.ports import Address
from tailrace.ledger.provenance import cut, server_spans
from tailrace.provenance import join_spans
from tailrace_agents.core.step_tokens import StepTokens
from tailrace_agents.core.tokens import EpisodeTokens
from tailrace_protos.base import (
    MalformedMessageError,
    as_uint8,
    decode,
    encode,
    pack_float32,
    pack_int32,
)
from tailrace_protos.control import Lease, split_source
from tailrace_protos.episode import TurnRecord
from tailrace_protos.generation import FinishReason, TokenSpan
from tailrace_protos.session import ExportStyle
from tailrace_protos.trajectory import ServerSpan, TokenRow
from tests.unit.tailrace.ledger.calls import assistant, new_ledger, sampled, user

TURNS = st.lists(
    st.lists(
        st.tuples(st.sampled_from(["a#1", "a#2", "b"]), st.integers(1, 4)), min_size=1, max_size=3
    ),
    min_size=1,
    max_size=5,
)


def expanded(spans: Sequence[ServerSpan]) -> list[str]:
    return [span.source for span in spans for _ in range(span.num_tokens)]


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
    assert expanded(row.server_spans) == kept
    assert int(as_uint8(row.loss_mask).sum()) == len(kept)

    by_turn = StepTokens(1)
    assert played(by_turn, turns, broken) == kept
    rows = by_turn.rows(0.0).rows
    assert [source for row in rows for source in expanded(row.server_spans)] == kept
    for step in rows:
        assert len(expanded(step.server_spans)) == int(as_uint8(step.loss_mask).sum())


def test_rows_of_a_ledger_know_who_sampled_them_and_skip_what_others_train() -> None:
    ledger = new_ledger()
    first = ledger.prepare([user("hello")])
    said = sampled(assistant("one")).sampled_by("a#1")
    ledger.record(first, said, assistant("one"), "c1")
    second = ledger.prepare([user("hello"), assistant("one"), user("more")])
    more = sampled(assistant("two")).sampled_by("b#1")
    ledger.record(second, more, assistant("two"), "c2")

    (row,) = ledger.rows(ExportStyle.CONCAT)
    expected = (ServerSpan("a#1", said.num_tokens), ServerSpan("b#1", more.num_tokens))
    assert row.server_spans == expected
    assert [each.server_spans for each in ledger.rows(ExportStyle.INDIVIDUAL)] == [
        expected[:1],
        expected[1:],
    ]


def test_where_nobody_told_the_source_none_is_claimed() -> None:
    assert server_spans([TokenSpan(1, "", 3)], np.ones(3, np.bool_)) == ()
    assert server_spans([], np.ones(0, np.bool_)) == ()
    assert server_spans([TokenSpan(1, "a", 3)], np.zeros(3, np.bool_)) == ()


def test_a_cut_counts_as_its_spans_do() -> None:
    spans = (ServerSpan("a", 2), ServerSpan("b", 3), ServerSpan("a", 1))
    assert cut(spans, 1, 4) == (ServerSpan("a", 1), ServerSpan("b", 2))
    assert cut(spans, 5, 9) == (ServerSpan("a", 1),)


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
    row = msgspec.msgpack.encode({"token_ids": bytes(pack_int32([1])), "row_id": "r"})
    assert msgspec.msgpack.decode(row, type=TokenRow).server_spans == ()


def test_a_server_that_was_started_again_is_another_source() -> None:
    lease = Lease("g0.1", "inference-0", "s", "z", incarnation="beef")
    source = Address.of(lease).source
    assert split_source(source) == ("inference-0", "beef")
    assert source != Address.of(Lease("g0.1", "inference-0", "s", "z", incarnation="cafe")).source
    assert Address("s0").source == "s0"
    assert split_source("s0") == ("s0", "")


def test_neighbours_of_one_version_stay_apart_when_two_servers_sampled_them() -> None:
    spans = (TokenSpan(1, "a", 2), TokenSpan(1, "b", 1), TokenSpan(1, "b", 2))
    assert join_spans(spans) == (TokenSpan(1, "a", 2), TokenSpan(1, "b", 3))
    generation = Generation(
        np.zeros(2, np.int32), np.zeros(2, np.float32), spans[:1], FinishReason.STOP, None, 0
    )
    assert generation.sampled_by("c").spans == (TokenSpan(1, "c", 2),)
    assert bytes(pack_float32(generation.inference_logprobs)) == bytes(8)
