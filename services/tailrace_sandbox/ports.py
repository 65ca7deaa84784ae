"""Ports of the tools: a sandbox that runs code confined."""

from dataclasses import dataclass, field
from typing import Any, Protocol


@dataclass(frozen=True)
class Execution:
    """Result of one call. `reason`: the limit that ended or interrupted it, or words of your backend
    for the model; empty: none did."""

    exit_code: int  # negative: the signal that ended it
    stdout: str = ""
    stderr: str = ""
    reason: str = ""
    is_cut: bool = False  # output beyond the limit is missing
    files: dict[str, bytes] = field(default_factory=dict)  # content, by path
    refused: tuple[str, ...] = ()  # files that were asked for and are too large or none
    ended_session: bool = False  # its variables and files are gone

    @property
    def is_ok(self) -> bool:
        """Tell whether it ended by itself and with success."""
        return not self.reason and self.exit_code == 0


class SandboxLostError(Exception):
    """The process that runs tool code ended or does not answer, through no fault of the call."""


TOOLS = {"python": "python", "shell": "shell", "kept_shell": "shell", "session": "python_session"}
"""Names of the tools by the mode of their work."""


@dataclass(frozen=True)
class Work:
    """One call: a Python program (`mode` python), the next piece of a session (session), a command line
    (shell), or one in a kept container (kept_shell)."""

    mode: str
    code: str
    wall_s: float
    stdin: str = ""
    files: dict[str, bytes] = field(default_factory=dict)  # content, by path
    outputs: tuple[str, ...] = ()  # patterns of files that are wanted back

    @property
    def payload(self) -> dict[str, Any]:
        """Payload as the confined process reads it."""
        key = "command" if self.mode == "shell" else "code"
        return {key: self.code, "files": self.files}


class SandboxSession(Protocol):
    """Confined place that keeps names and files from call to call."""

    async def execute(self, work: Work) -> Execution:
        """Run a piece of code; raises `SandboxLostError`."""

    async def close(self) -> None:
        """End it with everything that it started."""


class Sandbox(Protocol):
    """Backend of the service: runs code."""

    async def start(self) -> None:
        """Get ready for the first call; `ConfigError` if it cannot work here."""

    async def run(self, work: Work) -> Execution:
        """One call; raises `SandboxLostError`."""

    async def open_session(self, mode: str = "session", image: str = "") -> SandboxSession:
        """A new session for work of this mode (`session`: Python; `kept_shell`: command lines).

        `image`: wish of the task; empty for none. Raises `SandboxLostError`, and `ValueError` for an
        image that it may not have.
        """

    async def close(self) -> None:
        """Remove everything; calls and sessions are over."""
