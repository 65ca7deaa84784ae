"""What kind of processor this is, where that decides which of torch's libraries is the faster one."""

from __future__ import annotations

from functools import cache
from pathlib import Path

_CPU_INFO = Path("/proc/cpuinfo")


@cache
def is_intel() -> bool:
    """Whether the system says so; where it says nothing (macOS) it is none."""
    return _CPU_INFO.is_file() and "GenuineIntel" in _CPU_INFO.read_text(encoding="utf-8")
