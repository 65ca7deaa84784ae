"""`tailrace train examples/calculator/outside.yaml` with its agent, both killed and restarted."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from tests.audit import build_ledger, check_ledger
from tests.e2e.runs import ROOT, TAILRACE, environment
from tests.world.processes import kill_all, words_of

EXAMPLE = ROOT / "examples" / "calculator"
DEADLINE_S = 600.0
SMALL = (
    "max_steps=12",
    "eval_steps=0",
    "groups_per_step=8",
    "scheduler.eval_groups=64",
    "scheduler.eval_interim_groups=64",
    "agents.workflow.lease_s=5",
    "learner.save_trajectories=true",
    "inference.emission_log=true",
    "learner.zero_variance_groups=count",
    "learner.warm_start.num_steps=400",
    "+learner.warm_start.options.skill=0.5",  # a start that improves within seconds
)


@pytest.mark.heavy
@pytest.mark.timeout(DEADLINE_S + 60)
def test_an_outside_agent_trains_although_it_and_the_services_are_killed(tmp_path: Path) -> None:
    port = _free_port()
    run_dir = tmp_path / "outside"
    env = {**environment(), "TAILRACE_GATEWAY_ADMIN_KEY": "the-key-of-this-test"}
    url = f"http://127.0.0.1:{port}/v1"
    agents = {
        "py": [sys.executable, str(EXAMPLE / "agent.py"), url, "--slots", "24"],
        "js": [shutil.which("node") or "true", str(EXAMPLE / "agent.mjs"), url, "agent-1", "8"],
    }
    argv = [TAILRACE, "train", str(EXAMPLE / "outside.yaml"), *SMALL]
    argv += [f"output_dir={tmp_path}", f"gateway.port={port}"]
    with (
        _started(argv, env) as train,
        _started(agents["js"], env),
        _started(agents["py"], env) as first,
    ):
        _wait_for(run_dir, 3, train)
        first.kill()
        _kill_service(train, "tailrace_gateway")
        with _started(agents["py"], env):
            _wait_for(run_dir, 7, train)
            _kill_service(train, "tailrace_agents")
            assert train.wait(DEADLINE_S) == 0
    ledger = build_ledger(run_dir)
    check_ledger(ledger)
    rows = _metrics(run_dir)
    assert rows[-1]["eval/success_rate"] >= rows[0]["eval/success_rate"] + 0.15
    assert sum(row["outcome/timeout"] + row["outcome/infra_failure"] for row in rows) == 0


@contextmanager
def _started(argv: list[str], env: dict[str, str]) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(argv, env=env, stdout=subprocess.DEVNULL)
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _metrics(run_dir: Path) -> list[dict[str, float]]:
    path = run_dir / "metrics.jsonl"
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text.splitlines() if line.endswith("}")]


def _wait_for(run_dir: Path, step: int, train: subprocess.Popen[bytes]) -> None:
    _until(lambda: train.poll() is not None or len(_metrics(run_dir)) > step)
    assert train.poll() is None, "the run ended early"


def _until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def _kill_service(train: subprocess.Popen[bytes], module: str) -> None:
    for child in psutil.Process(train.pid).children(recursive=True):
        if module in words_of(child):
            kill_all([child])
            return
    raise AssertionError(f"no process of {module}")
