"""`Trainer`: runs `tailrace train` from Python, as a child process.

Invariants: the child never outlives this process; Ctrl-C drains it, a second Ctrl-C kills it; a
training that ends early raises an exception with the child's exit code.
"""

import ctypes
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

_PR_SET_PDEATHSIG = 1
_NUM_TAIL_LINES = 50
_USER_ERROR = 2

_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True)
class TrainingRun:
    """Completed training."""

    run_dir: Path
    metrics: dict[str, Any]  # the last line of metrics.jsonl


class TrainingFailedError(RuntimeError):
    """`tailrace train` failed with `exit_code`; `output_tail` is the end of its output.

    Exit code 2: the experiment is wrong, see the message; 1: the run or a service failed; negative:
    the signal that killed it.
    """

    def __init__(self, exit_code: int, output_tail: str) -> None:
        lines = output_tail.strip().splitlines() or ["(no output)"]
        starts = [index for index, line in enumerate(lines) if line.startswith("error:")]
        if exit_code == _USER_ERROR:  # the error may list several problems, a line each
            lines = lines[starts[-1] if starts else -1 :]
        shown = "\n".join(lines)
        super().__init__(f"tailrace train ended with exit code {exit_code}: {shown}")
        self.exit_code = exit_code
        self.output_tail = output_tail


class Trainer:
    """Trains one experiment on a local cluster.

    `config` is an experiment file, a folder with `experiment.yaml`, their name without `.yaml`, or the
    experiment itself as a dict.
    """

    def __init__(self, config: str | Path | Mapping[str, Any]) -> None:
        self._config = config

    def train(
        self,
        workflow: str | type | None = None,
        *,
        overrides: Sequence[str] | Mapping[str, Any] = (),
        overwrite: bool = False,
    ) -> TrainingRun:
        """Trains to the end and returns the run; copies the run's output to `sys.stdout`.

        `workflow` plays the rows of the data sets: `my_module.MyAgent`, or the class itself if it is
        defined at the top level of a module. `overrides` are `key=value` strings or a dict;
        `overwrite` deletes an earlier run of this name. Raises `TrainingFailedError`, and
        `KeyboardInterrupt` after the run has drained.
        """
        with tempfile.TemporaryDirectory(prefix="tailrace-") as folder:
            summary = Path(folder) / "summary.json"
            argv = [*_COMMAND, self._experiment_argument(Path(folder)), *_settings(overrides)]
            argv += ["--summary-file", str(summary)]
            argv += ["--overwrite"] if overwrite else []
            argv += ["--workflow", _import_path(workflow)] if workflow else []
            _run(argv, _environment(workflow))
            found = json.loads(summary.read_text(encoding="utf-8"))
        return TrainingRun(Path(found["run_dir"]), found["metrics"])

    def _experiment_argument(self, folder: Path) -> str:
        """Returns the experiment as an argument of the command line."""
        if not isinstance(self._config, Mapping):
            return str(self._config)
        path = folder / "experiment.yaml"
        path.write_text(yaml.safe_dump(dict(self._config), sort_keys=False), encoding="utf-8")
        return str(path)


_COMMAND = (sys.executable, "-m", "tailrace_cli", "train")


def _settings(overrides: Sequence[str] | Mapping[str, Any]) -> list[str]:
    if not isinstance(overrides, Mapping):
        return list(overrides)
    return [f"{key}={json.dumps(value)}" for key, value in overrides.items()]


def _import_path(workflow: str | type) -> str:
    """Returns the import path of a class, for a child process."""
    if isinstance(workflow, str):
        return workflow
    name, module = workflow.__qualname__, workflow.__module__
    if module == "__main__" and (script := _script()) is not None:
        module = script.stem
    if "." in name or module == "__main__":
        raise ValueError(
            f"workflow {module}.{name} has no import path: define it at the top of a module and pass "
            "'my_module.MyAgent'"
        )
    return f"{module}:{name}"


def _environment(workflow: str | type | None) -> dict[str, str]:
    """Returns the environment of the child; it can import a class of the running script."""
    environment = dict(os.environ)
    if isinstance(workflow, type) and workflow.__module__ == "__main__":
        script = _script()
        kept = environment.get("PYTHONPATH", "")
        parts = [str(script.parent) if script else "", kept]
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, parts))
    return environment


def _script() -> Path | None:
    file = getattr(sys.modules["__main__"], "__file__", None)
    return Path(file).absolute() if file else None


def _run(argv: Sequence[str], environment: Mapping[str, str]) -> None:
    """Runs to the end and copies the output; raises `TrainingFailedError`."""
    process = subprocess.Popen(
        argv,
        env=dict(environment),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,  # this process forwards Ctrl-C, once
        preexec_fn=_prepare_child,
    )
    tail: deque[str] = deque(maxlen=_NUM_TAIL_LINES)
    try:
        _pass_on(process, tail)
    except KeyboardInterrupt:
        process.send_signal(signal.SIGINT)
        _pass_on(process, tail)
        raise
    finally:
        process.kill()  # no effect after its end
        process.wait()
    if process.returncode:
        raise TrainingFailedError(process.returncode, "".join(tail))


def _pass_on(process: subprocess.Popen[str], tail: deque[str]) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        tail.append(line)
        sys.stdout.write(line)
    process.wait()


def _prepare_child() -> None:
    """Before exec: sets SIGTERM at the parent's death, and restores SIGINT."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
