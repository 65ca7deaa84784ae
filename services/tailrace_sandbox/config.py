"""Configuration of the sandbox service: the section `sandbox` of an experiment file."""

from typing import Literal

from tailrace.config import Config

MIB = 1024 * 1024


class CallLimits(Config, frozen=True, kw_only=True):
    """Limits of one call; for a session they hold over its whole life, except time, which counts per
    call."""

    wall_s: float = 10.0
    """Time limit of a call that requests no other limit; it may request up to `max_wall_s`."""

    max_wall_s: float = 60.0
    """Largest time limit that a call may request."""

    cpu_s: int = 120
    """Processor time of each single process."""

    memory_bytes: int = 512 * MIB
    """Memory of all processes of a call together, without files; pipes and sockets count as full."""

    max_processes: int = 32
    """Processes and threads of a call at any moment."""

    disk_bytes: int = 64 * MIB
    """Bytes in a call's folder, with deleted files that are still open."""

    max_files: int = 1024
    """Files and folders in a call's folder."""

    max_open_files: int = 128
    """Open files of each single process."""

    max_mappings: int = 16384
    """Memory mappings of all processes of a call together. The kernel's memory for them counts to no
    process, and many of them slow the checks down."""

    max_output_bytes: int = 64 * 1024
    """Bytes kept of standard output, and as many of standard error. The rest is dropped; a call that
    writes 64 times as much is ended."""

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
    """Calls that run at once, each in its own process; further calls wait."""

    max_sessions: int = 16
    """Open sessions of `python_session`, each in its own processes."""

    tier: Literal["full", "partial", "none"] = "full"
    """Least confinement that the service accepts. `partial` also accepts a machine without Landlock or
    without seccomp. `none` accepts any machine: then another mechanism must isolate the service.
    `tailrace doctor` prints the tier of a machine."""

    python: str = ""
    """Interpreter that runs tool code. Empty: the one that runs Tailrace, or /usr/bin/python3 if the
    sandbox's user may not enter its folder."""

    preload: tuple[str, ...] = ()
    """Modules that are imported before every call, for example numpy. If a module seeds random numbers
    at its import, they are the same in each call."""

    readable: tuple[str, ...] = ()
    """Folders and files that tool code may read in addition to the system's programs and the
    interpreter."""

    workspace_dir: str = ""
    """Parent of the folders of calls; empty: the system's folder for temporary files."""

    first_uid: int = 64000
    """First of the user ids for processes that run tool code, if the service runs as root. Each process
    takes another one. These users must own no files."""

    drain_s: float = 10.0
    """Time for running calls to end after SIGTERM."""

    def __post_init__(self) -> None:
        if self.max_concurrency < 1 or self.max_sessions < 1:
            raise ValueError("max_concurrency and max_sessions must be at least 1")
        if self.drain_s < 0:
            raise ValueError("drain_s must not be negative")
        if self.first_uid < 1000:
            raise ValueError("first_uid must be at least 1000: lower ones belong to the system")
