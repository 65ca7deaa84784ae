"""A service's start leaves out what no service uses, and keeps it from nobody who asks for it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SERVICE = """
import sys

import tailrace.runtime

def main():
    left_out = not {"aiohttp", "rich"} & sys.modules.keys()
    import aiohttp
    import rich
    return 7 if left_out and aiohttp.ClientSession and rich.print else 1
"""


def test_a_service_starts_without_packages_that_its_libraries_can_do_without(tmp_path: Path) -> None:
    (tmp_path / "probe").mkdir()
    (tmp_path / "probe" / "__init__.py").touch()
    (tmp_path / "probe" / "__main__.py").write_text(SERVICE)
    argv = [sys.executable, "-m", "tailrace.start", "probe"]
    ended = subprocess.run(argv, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 7, ended.stderr
