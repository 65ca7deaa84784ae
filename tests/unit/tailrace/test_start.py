"""A service's start leaves out what no service uses, and takes what the system lets it have."""

from __future__ import annotations

import os
import resource
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


LIMITED = """
import resource

def main():
    print(*resource.getrlimit(resource.RLIMIT_NOFILE))
    return 0
"""


def make_service(folder: Path, program: str) -> None:
    """A package `probe` whose `__main__` is `program`."""
    (folder / "probe").mkdir()
    (folder / "probe" / "__init__.py").touch()
    (folder / "probe" / "__main__.py").write_text(program)


@pytest.mark.parametrize(
    ("nats_url", "imported"), [("nats://127.0.0.1:4222", ""), ("wss://nats.example:443", "aiohttp")]
)
def test_a_service_starts_without_packages_that_its_libraries_can_do_without(
    nats_url: str, imported: str, tmp_path: Path
) -> None:
    make_service(tmp_path, SERVICE)
    argv = [sys.executable, "-m", "tailrace.start", "probe"]
    environment = {**os.environ, "TAILRACE_NATS_URL": nats_url}
    ended = subprocess.run(
        argv, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    assert (ended.returncode, ended.stdout.strip()) == (7, imported), ended.stderr


@pytest.mark.parametrize(("hard", "left"), [(512, "512 512"), (4096, "4096 4096")])
def test_a_service_may_open_as_many_files_as_the_system_lets_it(
    hard: int, left: str, tmp_path: Path
) -> None:
    """A gateway with the usual 1,024 would take no more connections than these."""
    allowed = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    if allowed != resource.RLIM_INFINITY and allowed < hard:
        pytest.skip("this system lets no process have more")
    make_service(tmp_path, LIMITED)
    ended = subprocess.run(
        ["sh", "-c", 'ulimit -n "$1" && ulimit -Sn 256 && exec "$2" -m tailrace.start probe', "sh",
         str(hard), sys.executable],
        cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert ended.stdout.strip() == left, ended.stderr
