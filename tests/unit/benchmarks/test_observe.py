"""Costs of observation are those against the run without it, which takes turns with it."""

from __future__ import annotations

import pytest

from benchmarks.bench_observe import KINDS, Pair, Run, added_processor_time, lost_throughput, report


def pair(kind: str, num_turns: int, processor_s: float = 100.0) -> Pair:
    return Pair(0, kind, Run(1000, 10.0, 100.0), Run(num_turns, 10.0, processor_s), 5)


def test_a_cost_is_the_share_of_throughput_that_is_lost() -> None:
    assert lost_throughput(pair("on", 800)) == pytest.approx(0.2)


def test_added_processor_time_is_compared_per_turn() -> None:
    assert added_processor_time(pair("on", 1000, 103.0)) == pytest.approx(0.03)
    assert added_processor_time(pair("on", 500, 50.0)) == pytest.approx(0.0)


@pytest.mark.parametrize(
    ("kind", "num_turns", "holds"), [("on", 975, True), ("on", 960, False), ("hanging", 990, False)]
)
def test_more_than_the_promised_cost_is_missed(kind: str, num_turns: int, holds: bool) -> None:
    pairs = [pair(each, num_turns if each == kind else 1000) for each in KINDS]
    assert report(pairs).exit_code == (0 if holds else 1)


def test_the_cost_of_a_kind_is_the_median_of_its_pairs() -> None:
    others = [pair(each, 1000) for each in KINDS if each != "on"]
    results = report([*others, pair("on", 500), pair("on", 1000), pair("on", 990)])
    assert results.exit_code == 0
    assert [row["kind"] for row in results.rows].count("on") == 3
