"""`tailrace train examples/calculator`, played by its own agents and by outside agents that are killed.

Half of the demonstrations of the warm start are right here, and 16 steps show whether a run learns; the
example itself starts with the format alone and takes 200.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from tests.audit import build_ledger, check_ledger
from tests.e2e.runs import ROOT, TAILRACE, environment, run
from tests.world.processes import kill_all, words_of
from tests.world.servers import free_port

EXAMPLE = ROOT / "examples" / "calculator"
DEADLINE_S = 600.0
SMALL = (
    "max_steps=16",  # about 0.75 from the 12th on, after 0.35 at the start
    "eval_steps=0",
    "groups_per_step=8",
    "scheduler.eval_groups=512",
    "scheduler.eval_interim_groups=512",
    "learner.save_trajectories=true",
    "inference.emission_log=true",
    "learner.zero_variance_groups=count",
)
WARM_START = ("learner.warm_start.num_steps=400", "+learner.warm_start.options.skill=0.5")
GAIN = 0.15  # of the success of sampled answers
NOISE = 0.2  # of a difference: its standard error for 512 questions is 0.03, and trainings differ too


@pytest.fixture(scope="module")
def inside(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run directory of a training whose episodes the cluster's own agents play."""
    folder = tmp_path_factory.mktemp("inside")
    settings = (*SMALL, *WARM_START, f"output_dir={folder}")
    result = run([TAILRACE, "train", str(EXAMPLE), *settings], DEADLINE_S)
    assert result.returncode == 0, result.stdout + result.stderr
    return folder / "calculator"


@pytest.mark.heavy
@pytest.mark.timeout(DEADLINE_S + 60)
def test_a_model_learns_to_call_the_calculator_instead_of_guessing(inside: Path) -> None:
    first, *_, last = _metrics(inside)
    assert last["eval/success_rate"] >= first["eval/success_rate"] + GAIN
    (players,) = json.loads((inside / "baselines.json").read_text()).values()
    assert last["eval/greedy/success_rate"] > max(players.values())


@pytest.mark.heavy
@pytest.mark.timeout(2 * DEADLINE_S + 60)
def test_outside_agents_train_as_the_workflow_does_although_they_and_the_services_are_killed(
    inside: Path, tmp_path: Path
) -> None:
    port = free_port()
    run_dir = tmp_path / "outside"
    env = {**environment(), "TAILRACE_GATEWAY_ADMIN_KEY": "the-key-of-this-test"}
    url = f"http://127.0.0.1:{port}/v1"
    agents = {
        "py": [sys.executable, str(EXAMPLE / "agent.py"), url, "--slots", "24"],
        "js": [shutil.which("node") or "true", str(EXAMPLE / "agent.mjs"), url, "agent-1", "8"],
    }
    argv = [TAILRACE, "train", str(EXAMPLE / "outside.yaml"), *SMALL, "agents.workflow.lease_s=5"]
    argv += [f"pretrain={inside}/checkpoints/step_0", "learner.from_scratch=null"]  # the same start
    argv += ["learner.warm_start=null", f"output_dir={tmp_path}", f"gateway.port={port}"]
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
    reached = rows[-1]["eval/success_rate"]
    assert reached >= rows[0]["eval/success_rate"] + GAIN
    assert reached >= _metrics(inside)[-1]["eval/success_rate"] - NOISE
    assert sum(row["outcome/timeout"] + row["outcome/infra_failure"] for row in rows) == 0


@contextmanager
def _started(argv: list[str], env: dict[str, str]) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(argv, env=env, stdout=subprocess.DEVNULL)
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()


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
