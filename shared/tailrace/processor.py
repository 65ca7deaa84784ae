"""Choice of the library that multiplies float32 matrices on this processor."""

from functools import cache
from pathlib import Path
from typing import Literal

CpuMatmul = Literal["auto", "torch", "onednn"]

_CPU_INFO = Path("/proc/cpuinfo")


def matmul_library(choice: CpuMatmul, *, has_onednn: bool) -> Literal["torch", "onednn"]:
    """Library that `choice` stands for on this processor; raises `ValueError` if torch lacks it.

    `auto` takes oneDNN where torch's default library falls back to AVX2, which is on every processor
    but Intel's.
    """
    if choice == "auto":
        return "onednn" if has_onednn and not is_intel() else "torch"
    if choice == "onednn" and not has_onednn:
        raise ValueError(
            "cpu_matmul onednn: this build of torch has no oneDNN linear kernel; use auto or torch"
        )
    return choice


@cache
def is_intel() -> bool:
    """Tell whether the system names Intel as the vendor; macOS names none."""
    return _CPU_INFO.is_file() and "GenuineIntel" in _CPU_INFO.read_text(encoding="utf-8")
