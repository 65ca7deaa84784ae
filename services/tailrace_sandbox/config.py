"""Configuration of the sandbox service: the section `sandbox` of an experiment file."""

from __future__ import annotations

from typing import Literal

from tailrace.config import Config

MIB = 1024 * 1024


class CallLimits(Config, frozen=True, kw_only=True):
    """Limits of one call; for a session they hold over its whole life, time alone per call."""

    wall_s: float = 10.0
    """Time a call may take unless it asks for less or, up to `max_wall_s`, for more."""

    max_wall_s: float = 60.0
    """The most that a call may ask for."""

    cpu_s: int = 120
    """Processor time of each single process."""

    memory_bytes: int = 512 * MIB
    """Memory of all processes of a call together, files not counted."""

    max_processes: int = 32
    """Processes and threads of a call at any moment."""

    disk_bytes: int = 64 * MIB
    """Bytes in a call's folder, deleted files that are still open included."""

    max_files: int = 1024
    """Files and folders in a call's folder."""

    max_open_files: int = 128
    """Open files of each single process."""

    max_output_bytes: int = 64 * 1024
    """Bytes kept of standard output, and as many of standard error. More is dropped; a call that writes
    64 times as much is ended."""

    max_transfer_bytes: int = 8 * MIB
    """Bytes of all files that go into or come out of one call."""

    def __post_init__(self) -> None:
        for key in self.__struct_fields__:
            if getattr(self, key) <= 0:
                raise ValueError(f"limits.{key} must be positive")
        if self.wall_s > self.max_wall_s:
            raise ValueError("limits.wall_s must not be more than limits.max_wall_s")


class SandboxConfig(Config, frozen=True, kw_only=True):
    """The sandbox service."""

    limits: CallLimits = CallLimits()
    """Bounds of each call."""

    max_concurrency: int = 2
    """Calls that run at once, each in a process of its own that waits for it; more wait."""

    max_sessions: int = 16
    """Sessions of `python_session` that live at once, each in processes of its own."""

    tier: Literal["full", "partial", "none"] = "full"
    """The least confinement that this service runs tool code with. `partial` also accepts a machine
    that lacks Landlock or seccomp, `none` accepts anything: then something else must isolate the
    service. `tailrace doctor` says what a machine gives."""

    python: str = ""
    """Interpreter that runs tool code. Empty: the one that runs Tailrace, or /usr/bin/python3 where the
    sandbox's user may not enter its folder."""

    preload: tuple[str, ...] = ()
    """Modules that every call finds imported already, for example numpy. Random numbers that a module
    seeds when it is imported are then the same in each call."""

    readable: tuple[str, ...] = ()
    """Folders and files that tool code may read besides the system's programs and the interpreter."""

    workspace_dir: str = ""
    """Where the folders of calls are made; empty: the system's folder for temporary files."""

    first_uid: int = 64000
    """As root, each process that runs tool code takes a user id of its own from here on, which must
    own no files."""

    drain_s: float = 10.0
    """At SIGTERM running calls get so long to end."""

    def __post_init__(self) -> None:
        if self.max_concurrency < 1 or self.max_sessions < 1:
            raise ValueError("max_concurrency and max_sessions must be at least 1")
        if self.drain_s < 0:
            raise ValueError("drain_s must not be negative")
        if self.first_uid < 1000:
            raise ValueError("first_uid must be at least 1000: lower ones belong to the system")
