"""Limits of one call."""

from dataclasses import dataclass, fields

MIB = 1024 * 1024
MAX_WATCHED = 4096  # descriptors that epolls of a call watch; more would make each count slow


@dataclass(frozen=True)
class Limits:
    """Bounds of one call, or, of a session's whole life, of everything but time and output."""

    wall_s: float = 10.0
    cpu_s: int = 60  # of each process
    memory_bytes: int = 512 * MIB  # of all processes together
    max_processes: int = 32  # threads count
    disk_bytes: int = 64 * MIB  # in the call's folder, deleted but open files included
    max_files: int = 1024  # in the call's folder
    max_open_files: int = 128  # per process
    max_mappings: int = 16384  # of all processes together
    max_output_bytes: int = 64 * 1024  # kept of standard output, and again of standard error

    @property
    def values(self) -> tuple[float, ...]:
        """For the way to the process that runs the call, which makes `Limits(*values)` of them."""
        return tuple(getattr(self, field.name) for field in fields(self))
