"""Costs fitted to reports of servers, and workloads read from a run."""

import json
import random
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest
from typer.testing import CliRunner

from tailrace.config import ConfigError
from tailrace_cli.__main__ import app
from tailrace_cli.simulation.calibration import COSTS, fit, read_reports
from tailrace_cli.simulation.traces import load_trace
from tailrace_protos.control import ServerState, ServerStatus
from tailrace_protos.episode import Outcome, StageSeconds
from tailrace_protos.event import EpisodeSettled, Event
from tailrace_scheduler.core.streams.settings import EngineModel

TRUE = EngineModel(a_s=5e-3, c_s=2e-5, d_s=6e-8, e_s=5e-5, kv_tokens=100_000, max_running=64)
FIRST = ServerStatus(
    server_id="s0", state=ServerState.READY, nats_subject="", zmq_endpoint="", host_id="h",
    policy_version=0, capacity_tokens=TRUE.kv_tokens, max_running=TRUE.max_running, num_running=0,
    num_waiting=0, num_failed=0, idle_s=0.0, busy_s=0.0, heartbeat_unix_s=0.0, incarnation="a",
)  # fmt: skip


def reports(
    count: int, seed: int = 1, noise: float = 0.0, counts_reads: bool = True
) -> Iterator[ServerStatus]:
    """Reports of a server with the true costs, whose load changes from one to the next."""
    draw, now = random.Random(seed), FIRST
    yield now
    for _ in range(count):
        steps, batch, prefilled = draw.randint(100, 900), draw.randint(1, 64), draw.randint(0, 40_000)
        used = draw.randint(1000, TRUE.kv_tokens)
        mean_kv = draw.randint(1000, TRUE.kv_tokens) if counts_reads else (now.used_tokens + used) / 2
        busy_s = steps * TRUE.step_s(batch, mean_kv) + prefilled * TRUE.e_s
        now = msgspec.structs.replace(
            now,
            heartbeat_unix_s=now.heartbeat_unix_s + 5,
            num_steps=now.num_steps + steps,
            num_read_tokens=now.num_read_tokens + steps * mean_kv if counts_reads else 0,
            busy_s=now.busy_s + busy_s * draw.uniform(1 - noise, 1 + noise),
            num_generated_tokens=now.num_generated_tokens + steps * batch,
            num_computed_tokens=now.num_computed_tokens + steps * batch + prefilled,
            used_tokens=used,
        )
        yield now


@pytest.mark.parametrize("counts_reads", [True, False])
@pytest.mark.parametrize(("noise", "tolerance"), [(0.0, 1e-6), (0.1, 0.15)])
def test_the_costs_that_made_the_reports_are_found(
    noise: float, tolerance: float, counts_reads: bool
) -> None:
    found = fit(list(reports(200, noise=noise, counts_reads=counts_reads)))
    for name in COSTS:
        assert found.costs[name] == pytest.approx(getattr(TRUE, name), rel=tolerance)
    assert found.median_error <= noise + 1e-6
    assert (found.costs["kv_tokens"], found.costs["max_running"]) == (100_000, 64)


def test_work_of_two_starts_of_a_server_is_not_mixed() -> None:
    old = list(reports(20))
    new = [msgspec.structs.replace(one, incarnation="b") for one in reports(20, seed=2)]
    mixed = fit([*old, *new])
    assert mixed.num_intervals == 40
    assert mixed.median_error < 1e-6


def test_a_cost_that_the_run_does_not_show_is_nearly_nothing_and_never_negative() -> None:
    flat = [msgspec.structs.replace(one, num_read_tokens=0, used_tokens=0) for one in reports(100)]
    assert min(fit(flat).costs[name] for name in COSTS) > 0


def test_a_report_that_is_no_text_is_named(tmp_path: Path) -> None:
    path = tmp_path / "engines.jsonl"
    path.write_bytes(b'{"server_id": "\xff"}\n')
    with pytest.raises(ConfigError, match=f"{path} holds a line that is no report"):
        read_reports(path)


def test_too_few_reports_are_refused_with_the_remedy() -> None:
    with pytest.raises(ConfigError, match=r"3 pairs of reports .* longer run"):
        fit(list(reports(3)))


def settled(group: str, member: int, **changes: object) -> bytes:
    body = EpisodeSettled(
        f"{group}.{member}", group, member, "train", Outcome.OK, "", 1.0, 1.0,
        num_sampled_tokens=90, num_turns=3, min_policy_version=0, max_policy_version=0,
        started_unix_s=0.0, finished_unix_s=20.0, stages=StageSeconds(2.0, 7.0, 1.0),
        context_tokens=150,
    )  # fmt: skip
    changed = msgspec.structs.replace(body, **changes)
    return msgspec.json.encode(Event(f"1-{member}", 0.0, "scheduler", changed)) + b"\n"


def test_a_run_is_a_workload(tmp_path: Path) -> None:
    lines = [settled("g0", 0), settled("g1", 0, phase="eval"), settled("g2", 0, context_tokens=0)]
    (tmp_path / "events.jsonl").write_bytes(b"".join(lines) + b'{"torn')
    workload = load_trace(tmp_path)
    plan, *_ = workload.draw(np.random.default_rng(1), 1)
    assert [turn.output_tokens for turn in plan] == [30, 30, 30]
    assert [turn.input_tokens for turn in plan] == [20, 20, 20]
    assert [turn.tool_s for turn in plan] == [5.0, 5.0, 0.0]
    assert workload.context_limit == 150


def test_a_run_without_episodes_is_no_workload(tmp_path: Path) -> None:
    (tmp_path / "events.jsonl").write_bytes(settled("g0", 0, phase="eval"))
    with pytest.raises(ConfigError, match="no train episode has ended"):
        load_trace(tmp_path)


def test_the_commands_calibrate_and_simulate_with_what_they_found(tmp_path: Path) -> None:
    (tmp_path / "events.jsonl").write_bytes(b"".join(settled("g0", member) for member in range(8)))
    lines = [msgspec.json.encode(one) + b"\n" for one in reports(50)]
    (tmp_path / "engines.jsonl").write_bytes(b"".join(lines))
    costs = tmp_path / "costs.json"
    made = CliRunner().invoke(app, ["simulate", "calibrate", str(tmp_path), "-o", str(costs)])
    assert made.exit_code == 0, made.output
    assert "50 intervals" in made.output
    assert json.loads(costs.read_text())["a_s"] == pytest.approx(TRUE.a_s, rel=1e-6)
    words = ["simulate", "--trace", str(tmp_path), "--engine", str(costs), "--servers", "1"]
    words += ["--episodes", "32", "--steps", "2", "--warmup-steps", "1", "--to", str(tmp_path / "out")]
    simulated = CliRunner().invoke(app, words)
    assert simulated.exit_code == 0, simulated.output
    (row,) = json.loads((tmp_path / "out" / "result.json").read_text())
    assert row["trained_tokens_per_s"] > 0
