"""Arguments of `Trainer`, and the end of its child."""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tailrace import Trainer, TrainingFailedError, trainer


class Agent:
    async def run(self, data: dict[str, Any]) -> float:
        return 1.0


@pytest.fixture
def child(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Let the trainer run a script of ours instead of the command line."""

    def run(script: str) -> None:
        monkeypatch.setattr(trainer, "_COMMAND", (sys.executable, "-c", script))

    return run


WRITE_SUMMARY = """
import json, sys
path = sys.argv[sys.argv.index("--summary-file") + 1]
print("training ...")
json.dump({"run_dir": "/runs/one", "metrics": {"argv": sys.argv[1:]}}, open(path, "w"))
"""


def test_everything_reaches_the_command_line_and_its_output_is_passed_on(
    child: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    child(WRITE_SUMMARY)
    run = Trainer("experiments/one").train(
        Agent, overrides={"max_steps": 3, "seed": None, "scheduler.tags": ["a"]}, overwrite=True
    )
    argv: Sequence[str] = run.metrics["argv"]
    assert run.run_dir == Path("/runs/one")
    assert argv[:4] == ["experiments/one", "max_steps=3", "seed=null", 'scheduler.tags=["a"]']
    assert "--overwrite" in argv
    assert argv[argv.index("--workflow") + 1] == f"{__name__}:Agent"
    assert capsys.readouterr().out == "training ...\n"


def test_a_dict_becomes_an_experiment_file(child: Any) -> None:
    child(WRITE_SUMMARY.replace("sys.argv[1:]", "open(sys.argv[1]).read()"))
    run = Trainer({"exp_name": "one", "agents": {"datasets": {}}}).train(overrides=["seed=2"])
    assert run.metrics["argv"] == "exp_name: one\nagents:\n  datasets: {}\n"


@pytest.mark.parametrize(
    ("script", "exit_code", "message"),
    [
        ("print('a'); print('error: b'); raise SystemExit(2)", 2, "exit code 2: error: b"),
        (
            "print('a'); print('error: 2 problems:\\n  b\\n  c'); raise SystemExit(2)",
            2,
            "exit code 2: error: 2 problems:\n  b\n  c",
        ),
        ("print('a'); print('b'); raise SystemExit(1)", 1, "exit code 1: a\nb"),
        ("import os, signal; os.kill(os.getpid(), 9)", -signal.SIGKILL, "(no output)"),
    ],
)
def test_a_failed_training_carries_exit_code_and_last_output(
    child: Any, script: str, exit_code: int, message: str
) -> None:
    child(script)
    with pytest.raises(TrainingFailedError) as caught:
        Trainer("one").train()
    assert caught.value.exit_code == exit_code
    assert message in str(caught.value)


def test_ctrl_c_lets_the_child_drain(
    child: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    child("""
import signal, time
try:
    print("up", flush=True)
    time.sleep(60)
except KeyboardInterrupt:
    print("drained", flush=True)
    raise SystemExit(130)
""")
    write = sys.stdout.write

    def interrupt_when_up(text: str) -> int:
        if text == "up\n":
            raise KeyboardInterrupt
        return write(text)

    monkeypatch.setattr(sys.stdout, "write", interrupt_when_up)
    with pytest.raises(KeyboardInterrupt):
        Trainer("one").train()
    assert capsys.readouterr().out == "drained\n"


def test_a_class_without_an_address_is_refused() -> None:
    class Local:
        async def run(self, data: dict[str, Any]) -> float:
            return 1.0

    with pytest.raises(ValueError, match="has no import path"):
        Trainer("one").train(Local)


def test_the_names_that_users_write_are_at_the_top() -> None:
    import tailrace

    assert {getattr(tailrace, name).__name__ for name in tailrace.__all__} == set(tailrace.__all__)
    with pytest.raises(AttributeError, match="nonsense"):
        tailrace.nonsense  # noqa: B018
