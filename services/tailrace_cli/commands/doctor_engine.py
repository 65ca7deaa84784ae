"""`tailrace doctor --engine`: an engine with a model folder, against the model's own forward.

The checks run in the engine's environment (`tailrace_inference.adapters.engine_checks`). Exit code 0 if
all hold, 1 if one fails, 2 for a mistake in the arguments.
"""

import json
import os
import subprocess
import tempfile
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table

from tailrace.config import ConfigError
from tailrace_cli.checkpoints import model_card
from tailrace_cli.cluster.plan import inference_python
from tailrace_cli.config import ClusterConfig

_LIMIT_S = 1800.0
_SHOWN_LINES = 20  # of the output of a process that failed
_CHECKS = '[{"what":'  # begin of the line with the checks


class _Check(msgspec.Struct):
    what: str
    state: str
    reason: str = ""


def doctor_engine(console: Console, engine: str, model: str, engine_args: str) -> int:
    """Print the table of checks and return the exit code; raise `ConfigError` for wrong arguments."""
    if not model:
        raise ConfigError("--engine needs --model: name a folder with a model")
    folder = Path(model)
    model_card(folder)
    try:
        arguments = json.loads(engine_args or "{}")
    except ValueError as error:
        raise ConfigError(f"--engine-args is no JSON object: {error}") from error
    if not isinstance(arguments, dict):
        raise ConfigError(f"--engine-args is no JSON object: {engine_args}")
    checks = _run(inference_python(ClusterConfig(), engine), folder, engine, arguments)
    table = Table(box=None, pad_edge=False)
    for title in ("", "what", "here", "remedy"):
        table.add_column(title, overflow="fold")
    for check in checks:
        table.add_row("FAILED" if check.reason else "ok", check.what, check.state, check.reason)
    console.print(table)
    return 1 if any(check.reason for check in checks) else 0


def _run(python: str, folder: Path, engine: str, arguments: dict[str, object]) -> list[_Check]:
    module = "tailrace_inference.adapters.engine_checks"
    argv = [python, "-m", module, str(folder), engine, json.dumps(arguments)]
    try:
        with tempfile.TemporaryFile() as output:  # where an engine may read what its processes say
            done = subprocess.run(
                argv, env=_environment(), stdout=output, stderr=output, timeout=_LIMIT_S, check=False
            )
            output.seek(0)
            lines = output.read().decode(errors="replace").splitlines() or [""]
    except subprocess.TimeoutExpired as error:
        raise ConfigError(f"the checks of {engine} did not end within {_LIMIT_S:g} s") from error
    # Processes of an engine may say something after it, when they end.
    checks = next((line for line in reversed(lines) if line.startswith(_CHECKS)), "")
    if done.returncode == 0 and checks:
        return msgspec.json.decode(checks, type=list[_Check])
    told = next((line for line in reversed(lines) if line.startswith("error: ")), "")
    if told:
        raise ConfigError(told.removeprefix("error: "))
    tail = "\n".join(lines[-_SHOWN_LINES:])
    raise ConfigError(f"the checks of {engine} failed with exit code {done.returncode}:\n{tail}")


def _environment() -> dict[str, str]:
    return {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", **os.environ}
