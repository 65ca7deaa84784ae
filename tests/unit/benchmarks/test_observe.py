"""Costs of observation are those against the same run while nothing is observed."""

from __future__ import annotations

import subprocess
import sys

import pytest

from benchmarks.bench_observe import (
    KINDS,
    SWITCHED,
    Block,
    added_processor_time,
    lost_throughput,
    report,
    turns_trained,
)
from benchmarks.live_run import Line
from benchmarks.observe_switch import BLOCK_S, is_on


def cycle(num_turns: int, processor_s: float = 10.0) -> list[Block]:
    off, on = Block(False, 1000, 10.0, 10.0), Block(True, num_turns, 10.0, processor_s)
    return [off, on, on, off]


def test_a_cost_is_the_share_of_throughput_that_is_lost() -> None:
    assert lost_throughput(cycle(800)) == pytest.approx(0.2)


def settled(group: str, num_turns: int) -> Line:
    body = {"type": "episode_settled", "group_id": group, "num_turns": num_turns}
    return Line(0.0, "scheduler", body)


def step(at_s: float, *groups: str) -> Line:
    body = {"type": "step_finished", "finished_unix_s": at_s, "group_ids": list(groups)}
    return Line(0.0, "scheduler", body)


def test_turns_of_a_block_are_those_between_its_first_and_its_last_step() -> None:
    lines = [settled("a", 5), settled("a", 5), settled("b", 7), settled("c", 9), settled("d", 3)]
    lines += [step(9.0, "z"), step(10.5, "a"), step(13.0, "b"), step(15.5, "c"), step(20.0, "d")]
    assert turns_trained(lines, 10.0, 20.0) == (16, 5.0)


def test_an_edge_that_moves_by_less_than_a_step_changes_nothing() -> None:
    lines = [settled("a", 5), *(step(float(at), "a") for at in range(30))]
    assert turns_trained(lines, 10.1, 20.1) == turns_trained(lines, 10.9, 20.9)


def test_a_block_without_two_steps_is_no_measurement() -> None:
    with pytest.raises(ValueError, match="1 steps ended"):
        turns_trained([step(15.0, "a")], 10.0, 20.0)


def test_a_steady_drift_costs_nothing() -> None:
    drift = [Block(is_on(at * BLOCK_S), 1000 + 10 * at, 10.0, 10.0) for at in range(4)]
    assert [each.is_on for each in drift] == [False, True, True, False]
    assert lost_throughput(drift) == pytest.approx(0.0)


def test_added_processor_time_is_compared_per_turn() -> None:
    assert added_processor_time(cycle(1000, 10.3)) == pytest.approx(0.03)
    assert added_processor_time(cycle(500, 5.0)) == pytest.approx(0.0)


@pytest.mark.parametrize(
    ("kind", "num_turns", "holds"), [("on", 975, True), ("on", 960, False), ("hanging", 990, False)]
)
def test_more_than_the_promised_cost_is_missed(kind: str, num_turns: int, holds: bool) -> None:
    measured = {each: [cycle(num_turns if each == kind else 1000)] for each in KINDS}
    assert report(measured).exit_code == (0 if holds else 1)


def test_the_cost_of_a_kind_is_the_mean_of_its_cycles_with_its_error() -> None:
    results = report({"on": [cycle(990), cycle(970)]})
    means = [row for row in results.rows if row["kind"] == "on: mean"]
    assert [(row["lost_throughput"], row["standard_error"]) for row in means] == [(0.02, 0.01)]
    assert results.exit_code == 0


def test_processes_of_a_run_sample_episodes_in_blocks_that_are_on_only() -> None:
    code = f"""
import time
from tailrace import tracing
from tailrace.config import RunConfig, TracingArgs
args = TracingArgs(mlflow="x", sample_rate=1.0)
tracing.configure(RunConfig(exp_name="x", tracing=args), "agents", "a")
for at in range(4):
    time.time = lambda: {BLOCK_S} * (at + 0.5)
    print(int(bool(tracing.episode("e"))), end="")
"""
    ran = subprocess.run(
        [sys.executable, "-c", code], env=SWITCHED, capture_output=True, text=True, check=True
    )
    assert ran.stdout == "0110"
