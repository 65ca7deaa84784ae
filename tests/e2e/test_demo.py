"""A fifth of the steps of `make demo`: the model is well on the way, within the promised memory.

`make bench-demo` measures and judges whole demos with several seeds, and times.
"""

from __future__ import annotations

import json
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from tests.e2e.runs import EXPERIMENT, TAILRACE, environment

DEADLINE_S = 900.0
MAX_BYTES = 6 * 1024**3
MAX_STEPS = 40  # after 24, a run had 0.71 sampled and 0.76 greedily: too near to what is asked here


def memory_bytes(pid: int) -> int:
    """Memory of a process tree, shared pages counted once (proportional set size); 0 once it ended."""
    try:
        process = psutil.Process(pid)
        members = [process, *process.children(recursive=True)]
    except psutil.Error:
        return 0
    total = 0
    for member in members:
        try:
            total += member.memory_full_info().pss
        except psutil.Error:
            continue
    return total


@dataclass(frozen=True)
class Ended:
    """A run that has ended: its folder, what it printed, the most memory that it held."""

    folder: Path
    printed: str
    num_bytes: int

    @property
    def rows(self) -> list[dict[str, float]]:
        """Metrics of its steps."""
        return [json.loads(line) for line in (self.folder / "metrics.jsonl").read_text().splitlines()]


def train(experiment: Path, name: str, output_dir: Path, *settings: str) -> Ended:
    """Run `tailrace train` to its end."""
    argv = [TAILRACE, "train", str(experiment), f"exp_name={name}", f"output_dir={output_dir}"]
    process = subprocess.Popen(
        [*argv, "seed=1", "eval_steps=0", *settings],
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    deadline = time.monotonic() + DEADLINE_S
    peak = 0
    try:
        while process.poll() is None and time.monotonic() < deadline:
            peak = max(peak, memory_bytes(process.pid))
            time.sleep(5.0)
        printed, _ = process.communicate(timeout=120)
    finally:
        process.kill()  # where it has not ended; its guardian ends the rest
    assert process.returncode == 0, printed
    return Ended(output_dir / name, printed, peak)


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Ended:
    """The demo's first steps."""
    return train(EXPERIMENT, "demo", tmp_path_factory.mktemp("runs"), f"max_steps={MAX_STEPS}")


@pytest.mark.heavy
@pytest.mark.timeout(DEADLINE_S + 60)
def test_the_demo_learns_to_cross_held_out_lakes(demo: Ended) -> None:
    first, last = demo.rows[0], demo.rows[-1]
    for key in ("eval/success_rate", "eval/greedy/success_rate"):
        assert first[key] <= 0.15
        assert last[key] >= 0.6
    (baselines,) = json.loads((demo.folder / "baselines.json").read_text()).values()
    # Whole demos end at 0.85 to 0.94, and their mean is above this player (`make bench-demo`).
    assert baselines.pop("avoid the next hole") == pytest.approx(0.874, abs=0.001)
    assert last["eval/greedy/success_rate"] > max(baselines.values())
    assert "simple player: avoid the next hole" in demo.printed
    assert f"held-out success, greedy, step {MAX_STEPS}" in demo.printed
    assert demo.num_bytes < MAX_BYTES, f"{demo.num_bytes / 1024**3:.2f} GiB"


@pytest.mark.heavy
@pytest.mark.timeout(2 * DEADLINE_S + 60)
def test_a_smaller_model_learns_from_the_judgement_of_the_demos_alone(demo: Ended) -> None:
    teacher = demo.folder / f"checkpoints/step_{MAX_STEPS}"
    student = train(
        EXPERIMENT.parent / "distillation",
        "student",
        demo.folder.parent,
        "max_steps=20",
        f"learner.reference.pretrain={teacher}",
    )
    begun, first, *_, last = student.rows
    assert begun["eval/success_rate"] <= 0.15
    assert last["eval/success_rate"] >= 0.5
    assert last["kl"] < first["kl"] / 2
