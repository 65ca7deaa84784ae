from pathlib import Path
from typing import Any

import pytest

from tailrace import processor
from tailrace.processor import matmul_library

READ_VENDOR = processor.is_intel  # tests see a replacement


@pytest.mark.parametrize(
    ("choice", "has_onednn", "is_intel", "library"),
    [
        ("auto", True, True, "torch"),
        ("auto", True, False, "onednn"),
        ("auto", False, False, "torch"),
        ("auto", False, True, "torch"),
        ("torch", True, False, "torch"),
        ("onednn", True, True, "onednn"),
    ],
)
def test_the_library_follows_the_key_and_auto_the_processor(
    choice: Any, has_onednn: bool, is_intel: bool, library: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processor, "is_intel", lambda: is_intel)
    assert matmul_library(choice, has_onednn=has_onednn) == library


def test_a_library_that_torch_lacks_is_refused_with_the_remedy() -> None:
    with pytest.raises(ValueError, match="no oneDNN linear kernel; use auto or torch"):
        matmul_library("onednn", has_onednn=False)


@pytest.mark.parametrize(
    ("cpu_info", "is_intel"),
    [("vendor_id : GenuineIntel\n", True), ("vendor_id : AuthenticAMD\n", False), (None, False)],
)
def test_the_vendor_is_read_from_the_system(
    cpu_info: str | None, is_intel: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "cpuinfo"
    if cpu_info is not None:
        path.write_text(cpu_info)
    monkeypatch.setattr(processor, "_CPU_INFO", path)
    assert READ_VENDOR.__wrapped__() is is_intel
