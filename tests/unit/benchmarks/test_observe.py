"""Costs of observation are those against the run without it, of the same round."""

from __future__ import annotations

import pytest

from benchmarks.bench_observe import KINDS, Measured, cost, report


def run(kind: str, wall_s: float, processor_s: float = 100.0, number: int = 0) -> Measured:
    return Measured(number, kind, 1000, wall_s, processor_s, 5)


def test_a_cost_is_the_share_of_throughput_that_is_lost() -> None:
    assert cost(run("off", 10.0), run("on", 12.5), "wall_s") == pytest.approx(0.2)
    assert cost(run("off", 10.0), run("on", 10.0, 103.0), "processor_s") == pytest.approx(0.03)


@pytest.mark.parametrize(
    ("kind", "wall_s", "holds"), [("on", 10.2, True), ("on", 10.5, False), ("hanging", 10.1, False)]
)
def test_more_than_the_promised_cost_is_missed(kind: str, wall_s: float, holds: bool) -> None:
    measured = [run(each, wall_s if each == kind else 10.0) for each in KINDS]
    assert report(measured).exit_code == (0 if holds else 1)


def test_a_round_that_is_not_whole_is_shown_and_not_compared() -> None:
    whole = [run(each, 10.0) for each in KINDS]
    results = report([*whole, run("off", 1.0, number=1)])
    assert results.exit_code == 0
    assert [row["round"] for row in results.rows].count(1) == 1
