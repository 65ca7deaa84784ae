"""Port of container runtimes: a box runs command lines in a folder of its own."""

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class BoxCommand:
    """A command line in a box. `stdin`: its whole input."""

    argv: tuple[str, ...]
    wall_s: float
    stdin: bytes = b""
    max_output_bytes: int = 64 * 1024


@dataclass(frozen=True)
class BoxAnswer:
    """End of a command; `reason`: the limit that ended it, and the box with it."""

    exit_code: int
    stdout: bytes = b""
    stderr: bytes = b""
    reason: str = ""
    is_cut: bool = False


class Box(Protocol):
    """A container, or anything else that runs command lines in a folder of its own."""

    async def execute(self, command: BoxCommand) -> BoxAnswer:
        """Run a command line in the working folder; raises `SandboxLostError`."""

    async def pause(self) -> None:
        """Stop everything in it."""

    async def resume(self) -> None:
        """Let it go on."""

    async def close(self) -> None:
        """Remove it and everything in it."""


class Boxes(Protocol):
    """Runtime of boxes."""

    async def start(self) -> None:
        """Remove what a killed service left; `ConfigError` if it cannot work here."""

    async def open(self, mode: str, image: str) -> Box:
        """Make a box for a mode of work; `image`: of the task, or empty. Raises `SandboxLostError`."""

    async def close(self) -> None:
        """Remove what is left."""
