"""How a call ended, and what a model reads of it."""

from __future__ import annotations

import json
import signal
from dataclasses import dataclass, field

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


@dataclass(frozen=True)
class Outcome:
    """Of one call. `reason`: the limit that ended it; empty: it ended by itself."""

    exit_code: int  # negative: the signal that ended it
    stdout: str = ""
    stderr: str = ""
    reason: str = ""
    is_cut: bool = False  # output beyond the limit is missing
    files: dict[str, str] = field(default_factory=dict)  # content in base64, by path
    refused: tuple[str, ...] = ()  # files that were asked for and are too large or none
    elapsed_s: float = 0.0

    @property
    def is_ok(self) -> bool:
        """Whether it ended by itself and with success."""
        return not self.reason and self.exit_code == 0

    def text(self, limits: dict[str, float]) -> str:
        """For a model: output, errors, and one line in brackets for each thing to know."""
        notes = []
        if self.is_cut:
            notes.append("output was cut")
        if self.reason:
            notes.append(f"ended because {_REASONS[self.reason].format(**limits)}")
        elif self.exit_code < 0:
            notes.append(f"ended by {signal.Signals(-self.exit_code).name}")
        elif self.exit_code:
            notes.append(f"exit code {self.exit_code}")
        parts = (self.stdout.rstrip("\n"), self.stderr.rstrip("\n"), *(f"[{note}]" for note in notes))
        return "\n".join(part for part in parts if part)

    def to_json(self) -> str:
        """Everything, for callers that asked for files."""
        return json.dumps(
            {
                "exit_code": self.exit_code,
                "stdout": self.stdout,
                "stderr": self.stderr,
                "reason": self.reason,
                "output_was_cut": self.is_cut,
                "files": self.files,
                "refused_files": list(self.refused),
            }
        )
