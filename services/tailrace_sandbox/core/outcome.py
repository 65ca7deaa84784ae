"""Reports of a call's end, for a model or a program."""

import json
import signal

from tailrace_sandbox.ports import Execution

_REASONS = {
    "wall_clock": "it took longer than {wall_s:g} s",
    "interrupted": "it took longer than {wall_s:g} s; variables are kept",
    "memory": "it used more than {memory_bytes} bytes of memory",
    "processes": "it had more than {max_processes} processes",
    "disk": "it wrote more than {disk_bytes} bytes",
    "files": "it made more than {max_files} files",
    "output": "it did not stop writing output",
    "uninspectable": "it hid its files or processes",
}


def text_of(outcome: Execution, limits: dict[str, float]) -> str:
    """For a model: output, errors, and one line in brackets for each thing to know."""
    notes = []
    if outcome.is_cut:
        notes.append("output was cut")
    if outcome.reason:
        notes.append(f"ended because {_REASONS[outcome.reason].format(**limits)}")
    elif outcome.exit_code < 0:
        notes.append(f"ended by {signal.Signals(-outcome.exit_code).name}")
    elif outcome.exit_code:
        notes.append(f"exit code {outcome.exit_code}")
    parts = (outcome.stdout.rstrip("\n"), outcome.stderr.rstrip("\n"), *(f"[{note}]" for note in notes))
    return "\n".join(part for part in parts if part)


def json_of(outcome: Execution) -> str:
    """Everything, for callers that asked for files."""
    return json.dumps(
        {
            "exit_code": outcome.exit_code,
            "stdout": outcome.stdout,
            "stderr": outcome.stderr,
            "reason": outcome.reason,
            "output_was_cut": outcome.is_cut,
            "files": outcome.files,
            "refused_files": list(outcome.refused),
        }
    )
