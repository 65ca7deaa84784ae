"""One server on two nodes: two processes of the service on this machine, and gloo between them."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tailrace_inference.ports import EngineFailedError
from tests.contract.engine.harness import ENGINE, LONG, ONE_GPU, TOLERANCE, TWO_NODES, Bench
from tests.e2e.runs import ROOT
from tests.world.processes import kill_all

pytestmark = [
    pytest.mark.skipif(ENGINE != "vllm", reason=f"the engine {ENGINE} has one node"),
    pytest.mark.skipif(ONE_GPU, reason="two ranks need two GPUs, or none"),
    pytest.mark.timeout(900),
]

NOTICED_S = 60.0
LEADER = """
import asyncio
from tests.contract.engine.harness import LONG, TWO_NODES, Bench

async def serve():
    bench = await Bench.start(**TWO_NODES)
    running = bench.ask([1, 2], LONG)
    await running.begun.wait()
    print("ready", flush=True)
    await asyncio.Event().wait()

asyncio.run(serve())
"""


@pytest.fixture
def master(monkeypatch: pytest.MonkeyPatch) -> str:
    with socket.create_server(("127.0.0.1", 0)) as server:
        master = f"127.0.0.1:{server.getsockname()[1]}"
    monkeypatch.setenv("TAILRACE_MASTER", master)
    monkeypatch.setenv("TAILRACE_NODE_RANK", "0")
    monkeypatch.setenv("VLLM_HOST_IP", "127.0.0.1")
    return master


def started(command: list[str], rank: int) -> subprocess.Popen[str]:
    env = os.environ | {"TAILRACE_NODE_RANK": str(rank)}
    return subprocess.Popen(
        [sys.executable, *command], stdout=subprocess.PIPE, text=True, cwd=ROOT, env=env
    )


def ended(process: subprocess.Popen[str]) -> None:
    if process.poll() is None:
        kill_all(psutil.Process(process.pid).children(recursive=True))
    process.kill()
    process.communicate()


@pytest.fixture
def follower(master: str) -> Iterator[subprocess.Popen[str]]:
    process = started(["-m", "tests.contract.engine.nodes"], 1)
    yield process
    ended(process)


def folder_of(follower: subprocess.Popen[str]) -> Path:
    """Folder of a follower's versions, once its workers run."""
    assert follower.stdout is not None
    return Path(next(line for line in follower.stdout if line.startswith("ready ")).split()[1])


def versions_in(folder: Path) -> list[str]:
    return sorted(path.stem for path in folder.glob("*.safetensors"))


@pytest.mark.parametrize("dies", ["follower", "worker of the follower"])
async def test_two_nodes_serve_the_weights_of_each_update_until_one_dies(
    follower: subprocess.Popen[str], dies: str
) -> None:
    """Its worker's death breaks the leader's collective before the follower can tell of it."""
    bench: Any = await Bench.start(**TWO_NODES)
    folder = await asyncio.to_thread(folder_of, follower)
    watching = asyncio.create_task(bench.engine.watch())
    try:
        for expected in (0, 1, 2, 3):
            asked = await bench.one([5, 6, 7, 8 + expected], 24, seed=3)
            assert asked.error is None
            assert len(asked.new_ids) == 24
            assert set(asked.versions()) == {expected}
            assert asked.drift(bench.model).max() < TOLERANCE
            newest = [str(version) for version in (expected - 1, expected) if version >= 0]
            assert versions_in(folder) == newest
            assert versions_in(bench.engine._stage._folder.path) == newest
            await bench.update()
        await bench.stage()
        running = bench.ask([1, 2], LONG)
        await running.begun.wait()
        children = psutil.Process(follower.pid).children(recursive=True)
        if dies == "follower":
            follower.kill()
        else:
            kill_all(children)
        with pytest.raises(EngineFailedError, match="node 1 of this server is lost"):
            async with asyncio.timeout(NOTICED_S):
                await watching
        with pytest.raises(EngineFailedError):
            await bench.engine.apply()
        _, alive = await asyncio.to_thread(psutil.wait_procs, children, NOTICED_S)
        assert not alive
    finally:
        await bench.engine.close()


def test_followers_end_with_a_killed_leader(master: str, follower: subprocess.Popen[str]) -> None:
    assert follower.stdout is not None
    leader = started(["-c", LEADER], 0)
    try:
        assert leader.stdout is not None
        assert any(line == "ready\n" for line in leader.stdout)
        folder = folder_of(follower)
        children = psutil.Process(follower.pid).children(recursive=True)
        assert children
        kill_all(psutil.Process(leader.pid).children(recursive=True))  # first, as a busy machine may
        leader.send_signal(signal.SIGKILL)
        assert follower.wait(NOTICED_S) == 0
        assert "ended: the leader of this server is lost" in follower.stdout.read()
        assert not psutil.wait_procs(children, NOTICED_S)[1]
        assert not folder.exists()
    finally:
        ended(leader)
