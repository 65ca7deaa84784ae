"""A service's start leaves out what no service uses, and keeps it from nobody who asks for it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SERVICE = """
import sys

import tailrace.runtime

def main():
    print(*sorted({"aiohttp", "rich"} & sys.modules.keys()))
    import aiohttp
    import rich
    return 7 if aiohttp.ClientSession and rich.print else 1
"""


@pytest.mark.parametrize(
    ("nats_url", "imported"), [("nats://127.0.0.1:4222", ""), ("wss://nats.example:443", "aiohttp")]
)
def test_a_service_starts_without_packages_that_its_libraries_can_do_without(
    nats_url: str, imported: str, tmp_path: Path
) -> None:
    (tmp_path / "probe").mkdir()
    (tmp_path / "probe" / "__init__.py").touch()
    (tmp_path / "probe" / "__main__.py").write_text(SERVICE)
    argv = [sys.executable, "-m", "tailrace.start", "probe"]
    environment = {**os.environ, "TAILRACE_NATS_URL": nats_url}
    ended = subprocess.run(
        argv, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    assert (ended.returncode, ended.stdout.strip()) == (7, imported), ended.stderr
