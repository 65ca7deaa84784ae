"""An engine with processes of its own leaves none behind when its server is killed."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tailrace_inference.adapters.staging import OwnFolder
from tests.contract.engine.harness import ENGINE
from tests.e2e.runs import ROOT
from tests.world.processes import kill_all

pytestmark = pytest.mark.skipif(
    ENGINE in ("torch", "hf"), reason=f"{ENGINE} computes in the server's own process"
)

SERVER = """
import asyncio
from tests.contract.engine.harness import Bench

async def serve():
    bench = await Bench.start(max_running=8, kv_cache_tokens=4096)
    print("ready", bench.engine._stage._folder.path, flush=True)
    await asyncio.Event().wait()

asyncio.run(serve())
"""


@pytest.fixture
def server(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-c", SERVER],
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env=os.environ | {"TMPDIR": str(tmp_path)},
    )
    yield process
    if process.poll() is None:
        kill_all(psutil.Process(process.pid).children(recursive=True))
    process.kill()
    process.communicate()


@pytest.mark.timeout(900)
def test_a_killed_server_leaves_no_process_and_no_weights(
    server: subprocess.Popen[str], tmp_path: Path
) -> None:
    assert server.stdout is not None
    kept_by_others = set(Path("/dev/shm").glob("sglang_*"))
    ready = next(line for line in server.stdout if line.startswith("ready "))
    folder = Path(ready.split()[1])
    assert folder.is_dir()
    children = psutil.Process(server.pid).children(recursive=True)
    assert children
    server.kill()
    _, alive = psutil.wait_procs(children, timeout=60)
    assert not alive
    OwnFolder().remove()  # the next server's start
    assert not folder.exists()
    assert not [path for path in tmp_path.rglob("*") if path.is_socket()]
    assert not set(Path("/dev/shm").glob("sglang_*")) - kept_by_others
