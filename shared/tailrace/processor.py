"""Processor vendor, which decides the faster library of torch."""

from __future__ import annotations

from functools import cache
from pathlib import Path

_CPU_INFO = Path("/proc/cpuinfo")


@cache
def is_intel() -> bool:
    """True on an Intel processor; False where the system does not tell (macOS)."""
    return _CPU_INFO.is_file() and "GenuineIntel" in _CPU_INFO.read_text(encoding="utf-8")
