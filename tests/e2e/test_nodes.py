"""A whole run whose learner is on two nodes: each service is a process, as its pod starts it."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tailrace.config import Endpoints
from tailrace_cli.experiment import load
from tests.audit import Ledger, build_ledger, check_ledger
from tests.e2e.processes import num_steps
from tests.e2e.runs import EXPERIMENT, PENALTY, SMALL
from tests.integration.learner.conftest import remove_segments
from tests.world.learner_nodes import node_environment, stop_at_once
from tests.world.processes import ServiceProcess, environment
from tests.world.servers import free_port

DEADLINE_S = 400.0
ENDS_WITHIN_S = 90.0
MAX_STEPS = 8
NODES = ("learner-0", "learner-1")
OTHERS = ("weight_sync", "inference", "scheduler", "reward", "agents")
SETTINGS = (
    f"max_steps={MAX_STEPS}",
    "save_steps=2",
    "learner.drain_s=40",
    "learner.strategy_args.strategy_name=fsdp2",
    "learner.strategy_args.num_ranks=2",
)


class Pods:
    """Processes of a run; one that ends in failure starts again, as the kubelet does it."""

    def __init__(self, folder: Path, endpoints: Endpoints, run: str) -> None:
        self.run_dir = folder / run
        self.ends: list[tuple[str, int]] = []
        self._folder, self._port = folder, free_port()
        self._env = environment(endpoints, folder)
        self._config = folder / "experiment.yaml"
        settings = (*SMALL, PENALTY, *SETTINGS, f"output_dir={folder}", f"exp_name={run}")
        self._config.write_text(load(EXPERIMENT / "experiment.yaml", settings).to_yaml())
        self.processes = {name: self._started(name) for name in (*OTHERS, *NODES)}

    def _started(self, name: str) -> ServiceProcess:
        nodes = node_environment(f"run-{name}", self._port)
        process = ServiceProcess(
            name.partition("-")[0],
            self._config,
            self._env | (nodes if name in NODES else {}),
            self._folder / f"{name}.log",
            ("--instance-id", name),
        )
        process.start()
        return process

    def until_step(self, step: int) -> None:
        """Return once the run has so many steps behind it."""
        end = time.monotonic() + DEADLINE_S
        while num_steps(self.run_dir) < step:
            assert time.monotonic() < end, self.log("learner-0")
            self.restart_failed()
            time.sleep(0.05)

    def until_finished(self) -> None:
        """Return once the scheduler has told the end of the run."""
        end = time.monotonic() + DEADLINE_S
        while b'"run_finished"' not in (self.run_dir / "events.jsonl").read_bytes():
            assert time.monotonic() < end, self.log("learner-0")
            self.restart_failed()
            time.sleep(0.05)

    def restart_failed(self) -> None:
        for name, process in self.processes.items():
            code = process.running.poll()
            if code is not None:
                self.ends.append((name, code))
                self.processes[name] = self._started(name)

    def rank_of(self, name: str) -> psutil.Process:
        (rank,) = psutil.Process(self.processes[name].running.pid).children()
        return rank

    def log(self, name: str) -> str:
        return self.processes[name].log[-5000:]

    def end(self, names: tuple[str, ...]) -> list[int]:
        """SIGTERM to all of them at once; returns their exit codes."""
        return stop_at_once([self.processes[name] for name in names], ENDS_WITHIN_S)

    def kill(self) -> None:
        for process in self.processes.values():
            process.kill()


def saved_before(ledger: Ledger, resumed: dict[str, Any]) -> int:
    """Step of the newest checkpoint that was told before the learner resumed.

    One whose learner died before it told of it may be newer.
    """
    bodies = [line["body"] for line in ledger.lines]
    before = bodies[: bodies.index(resumed)]
    return max(body["step"] for body in before if body["type"] == "checkpoint_saved")


@pytest.fixture
def pods(tmp_path: Path, endpoints: Endpoints, run_name: str) -> Iterator[Pods]:
    started = Pods(tmp_path, endpoints, run_name)
    yield started
    started.kill()
    remove_segments(run_name)


@pytest.mark.heavy
@pytest.mark.timeout(2 * DEADLINE_S)
def test_a_learner_on_two_nodes_trains_serves_and_survives_a_node(pods: Pods) -> None:
    """The second node's rank dies as the kernel kills one for want of memory: with SIGKILL."""
    pods.until_step(3)
    pods.rank_of("learner-1").kill()
    pods.until_step(num_steps(pods.run_dir) + 2)
    assert {(name, code) for name, code in pods.ends} == {("learner-0", 1), ("learner-1", 1)}
    pods.until_finished()
    assert pods.end(NODES) == [0, 0]
    assert pods.end(OTHERS) == [0] * len(OTHERS)

    ledger = build_ledger(pods.run_dir)
    check_ledger(ledger)
    assert ledger.last_step == MAX_STEPS
    lineages = ledger.of_type("learner_resumed")
    assert lineages[0]["step"] == 0
    known = saved_before(ledger, lineages[-1])
    assert lineages[-1]["step"] in (known, known + 2), "the newest checkpoint"
    assert lineages[-1]["step"] >= 2
    finished = ledger.of_type("step_finished")
    served = {body["policy_version"] for body in ledger.of_type("server_weights_applied")}
    assert finished[-1]["policy_version"] in served
    saved = [body["step"] for body in ledger.of_type("checkpoint_saved")]
    assert set(range(0, MAX_STEPS + 1, 2)) <= set(saved)
    assert saved.count(MAX_STEPS) == 1
    checkpoints = pods.run_dir / "checkpoints"
    assert not list(checkpoints.glob(".part-*"))
    state = json.loads((checkpoints / f"step_{MAX_STEPS}" / "run_state.json").read_text())
    assert state["step"] == MAX_STEPS
    rows = [json.loads(line) for line in (pods.run_dir / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(MAX_STEPS + 1))
    losses = [row["loss"] for row in rows if row["loss"] is not None]
    assert losses
    assert all(math.isfinite(loss) for loss in losses)
