"""Provenance of trained tokens is kept through rows of every kind, and through old files."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tailrace.channel.ports import Address
from tailrace.ledger import Ledger
from tailrace.provenance import join_spans
from tailrace_protos.base import as_uint8, encode, pack_float32, pack_int32
from tailrace_protos.control import split_source
from tailrace_protos.episode import Lease
from tailrace_protos.generation import FinishReason, TokenSpan
from tailrace_protos.journal import OldRecordError, decode_record
from tailrace_protos.session import ExportStyle, LedgerNode
from tests.provenance import sources_of
from tests.unit.tailrace.ledger.calls import assistant, new_ledger, sampled, user

TURNS = st.lists(
    st.lists(
        st.tuples(st.sampled_from(["a#1", "a#2", "b"]), st.integers(1, 4)), min_size=1, max_size=3
    ),
    min_size=1,
    max_size=5,
)


def played(
    ledger: Ledger, turns: list[list[tuple[str, int]]], broken: set[int], *, whole: bool
) -> list[str]:
    """Play the turns; the source of every token that is trained."""
    kept: list[str] = []
    number = 0
    for turn, parts in enumerate(turns):
        spans = join_spans(TokenSpan(3, source, count) for source, count in parts)
        sources = [source for source, count in parts for _ in range(count)]
        logprobs = np.full(len(sources), -1.0, np.float32)
        for at, source in enumerate(sources):
            if number in broken:
                logprobs[at] = np.nan
            else:
                kept.append(source)
            number += 1
        node = LedgerNode(
            completion_id=str(turn),
            parent_id=str(turn - 1) if turn else "",
            messages=(),
            inserted_ids=pack_int32([1, 2]),
            token_ids=pack_int32([0] * len(sources)),
            inference_logprobs=pack_float32(logprobs),
            spans=spans,
            finish_reason=FinishReason.STOP,
            reply=assistant("x"),
            is_rendered_whole=whole,
        )
        ledger.add(node)
    return kept


@settings(max_examples=60, deadline=None)
@given(TURNS, st.sets(st.integers(0, 40), max_size=6))
def test_every_trained_token_of_an_episode_has_the_source_that_sampled_it(
    turns: list[list[tuple[str, int]]], broken: set[int]
) -> None:
    rewards, hashes = [0.0] * len(turns), list(range(len(turns)))
    ledger = new_ledger()
    kept = played(ledger, turns, broken, whole=False)
    (row,) = ledger.turn_rows(ExportStyle.CONCAT, 1.0, rewards, hashes)
    assert sources_of(row.spans) == kept
    assert int(as_uint8(row.loss_mask).sum()) == len(kept)

    for whole in (False, True):
        by_turn = new_ledger()
        assert played(by_turn, turns, broken, whole=whole) == kept
        rows = by_turn.turn_rows(ExportStyle.STEP, 1.0, rewards, hashes)
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


class _OldCall(msgspec.Struct, tag="call_record"):
    node: dict[str, str]
    index: int = 0


@pytest.mark.parametrize(
    ("record", "kind"),
    [(_OldTurn((_OldSpan(4, 2),)), "turn_record"), (_OldCall({"completion_id": "c"}), "call_record")],
)
def test_a_journal_of_another_form_is_refused_by_name(record: object, kind: str) -> None:
    with pytest.raises(OldRecordError, match=kind) as caught:
        decode_record(encode(record))
    assert caught.value.kind == kind


def test_a_server_that_was_started_again_is_another_source() -> None:
    lease = Lease("g0.1", "inference-0", "s", "z", incarnation="beef")
    source = Address.of(lease).source
    assert split_source(source) == ("inference-0", "beef")
    assert source != Address.of(Lease("g0.1", "inference-0", "s", "z", incarnation="cafe")).source
    assert Address("s0").source == "s0"
    assert split_source("s0") == ("s0", "")
