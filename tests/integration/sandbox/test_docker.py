"""Containers of a real Docker daemon as places of tool code.

They need a daemon and the image that `tests/container/sandbox.sh` makes, which runs this file as well.
`TAILRACE_TEST_IMAGE` names another image with Python. Without a daemon or the image, the tests say so
and skip.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import TypeVar

import msgspec
import pytest

from tailrace.config import ConfigError
from tailrace_sandbox.adapters.backends import open_sandbox
from tailrace_sandbox.adapters.docker import LABEL, own_process
from tailrace_sandbox.adapters.docker_program import Docker
from tailrace_sandbox.config import DockerConfig, SandboxConfig
from tailrace_sandbox.ports import Execution, Sandbox, Work
from tests.integration.sandbox.box import LIMITS, MIB
from tests.integration.sandbox.contract import Call, ToolsContract, calling

IMAGE = os.environ.get("TAILRACE_TEST_IMAGE", "tailrace-sandbox-test:bookworm")
PROGRAM = "/usr/bin/docker" if Path("/usr/bin/docker").exists() else "docker"
CONFIG = SandboxConfig(
    backend="docker",
    limits=LIMITS,
    docker=DockerConfig(
        image=IMAGE, task_images=("tailrace-sandbox-*",), pull="never", program=PROGRAM
    ),
)
DEADLINE_S = 30.0

T = TypeVar("T")


def _docker(*argv: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([PROGRAM, *argv], capture_output=True, text=True, timeout=60, check=False)


@pytest.fixture(scope="module", autouse=True)
def _reaches_docker() -> None:
    try:
        found = _docker("image", "inspect", "--format", "{{.Id}}", IMAGE)
    except OSError as error:
        pytest.skip(f"no docker here: {error}")
    if found.returncode:
        pytest.skip(f"no Docker daemon with the image {IMAGE}: {found.stderr.strip()}")


@pytest.fixture
async def sandbox() -> AsyncIterator[Sandbox]:
    made = await open_sandbox(CONFIG, "test")
    yield made
    await made.close()
    assert _own_containers() == []


@pytest.fixture
async def call(sandbox: Sandbox) -> AsyncIterator[Call]:
    async with calling(sandbox, CONFIG) as made:
        yield made


def _own_containers(owner: str = "") -> list[str]:
    label = f"label={LABEL}={owner or own_process()}"
    return _docker("ps", "-aq", "--filter", label).stdout.split()


async def _until(found: Callable[[], T]) -> T:
    """Asks until the answer is true."""
    async with asyncio.timeout(DEADLINE_S):
        while not (answer := await asyncio.to_thread(found)):
            await asyncio.sleep(0.05)
    return answer


class TestContainers(ToolsContract):
    """`backend: docker`."""


OUTSIDE = {
    "root": "import os; print(os.getuid())",
    "network": "import socket; socket.create_connection(('1.1.1.1', 53), 3); print('0')",
    "root file system": "open('/usr/x', 'w'); print('0')",
    "capabilities": "print(int('CapBnd:\\t0000000000000000' in open('/proc/self/status').read()))",
    "rights of programs": "print(int('NoNewPrivs:\\t1' in open('/proc/self/status').read()))",
    "processes of others": "import os; print(int(sum(p.isdigit() for p in os.listdir('/proc')) < 9))",
}


@pytest.mark.parametrize("name", OUTSIDE)
async def test_a_container_does_not_have(name: str, sandbox: Sandbox) -> None:
    outcome = await sandbox.run(Work("python", OUTSIDE[name], 10.0))
    assert outcome.stdout.strip() != "0", outcome


BOMBS: dict[str, tuple[str, Callable[[Execution], bool]]] = {
    "memory": (
        f"x = bytearray({LIMITS.memory_bytes * 2})",
        lambda outcome: outcome.reason == "memory" and "more than" not in outcome.stderr,
    ),
    "processes": ("import os\nwhile True: os.fork()", lambda outcome: not outcome.is_ok),
    "disk": (
        f"open('f', 'wb').write(bytes({LIMITS.disk_bytes + MIB}))",
        lambda outcome: "No space left" in outcome.stderr,
    ),
    "files": (
        f"for n in range({LIMITS.max_files + 2}): open(f'f{{n}}', 'w').close()",
        lambda outcome: "No space left" in outcome.stderr,
    ),
    "open files": (
        f"files = [open('/dev/null') for _ in range({LIMITS.max_open_files + 1})]",
        lambda outcome: "Too many open files" in outcome.stderr,
    ),
}


@pytest.mark.parametrize("name", BOMBS)
async def test_limits_hold_and_the_next_call_runs(name: str, sandbox: Sandbox) -> None:
    code, is_stopped = BOMBS[name]
    outcome = await sandbox.run(Work("python", code, 10.0))
    assert is_stopped(outcome), outcome
    assert (await sandbox.run(Work("python", "print(1)", 10.0))).stdout == "1\n"


async def test_nothing_of_a_session_runs_between_calls(sandbox: Sandbox) -> None:
    session = await sandbox.open_session()
    spin = (
        "import threading\nruns = 0\ndef spin():\n    global runs\n    while True: runs += 1\n"
        "threading.Thread(target=spin, daemon=True).start()"
    )
    await session.execute(Work("session", spin, 10.0))
    (name,) = _own_containers()
    assert _docker("inspect", "--format", "{{.State.Paused}}", name).stdout == "true\n"
    assert (await session.execute(Work("session", "print(runs > 0)", 10.0))).stdout == "True\n"
    await session.close()


async def test_a_shell_can_keep_its_container_and_its_task_choose_the_image(sandbox: Sandbox) -> None:
    config = msgspec.structs.replace(CONFIG, keep_shell=True)
    async with calling(sandbox, config, {"image": IMAGE}) as call:
        await call("shell", command="mkdir repo && echo kept >repo/file")
        assert (await call("shell", command="cat repo/file")).content == "kept"
        slow = await call("shell", command="sleep 30", timeout_s=1)
        assert "[ended because it took longer than 1 s; files are kept]" in slow.content
        assert (await call("shell", command="cat repo/file")).content == "kept"
    async with calling(sandbox, config, {"image": "somebody/else"}) as call:
        refused = await call("shell", command="true")
        assert "sandbox.docker.task_images" in refused.infra_error


async def test_a_cancelled_call_leaves_no_container(sandbox: Sandbox) -> None:
    running = asyncio.create_task(sandbox.run(Work("python", "while True: pass", 60.0)))
    await _until(_own_containers)
    running.cancel()
    assert await _until(lambda: not _own_containers())


async def test_a_container_that_is_removed_from_outside_costs_its_call_nothing(
    sandbox: Sandbox, tmp_path: Path
) -> None:
    running = asyncio.create_task(
        sandbox.run(Work("python", "import time; time.sleep(3); print(1)", 30.0))
    )
    (name,) = await _until(_own_containers)
    await _until(lambda: "python3" in _docker("top", name).stdout)
    _docker("rm", "-f", name)
    assert (await running).stdout == "1\n"


KILLED = """
import asyncio, os, signal, sys
from tests.integration.sandbox.test_docker import CONFIG
from tailrace_sandbox.adapters.backends import open_sandbox
from tailrace_sandbox.adapters.docker import own_process
from tailrace_sandbox.ports import Work
async def main():
    sandbox = await open_sandbox(CONFIG, "killed")
    session = await sandbox.open_session()
    await session.execute(Work("session", "x = 1", 10.0))
    if sys.argv[1] == "without guard":
        sandbox._boxes._guard.kill()
        await sandbox._boxes._guard.wait()
    print(own_process(), flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
asyncio.run(main())
"""


def _kill_a_service(how: str) -> str:
    """A service with a paused session is killed; its name."""
    done = subprocess.run(
        [sys.executable, "-c", KILLED, how], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == -9, done.stderr
    return done.stdout.splitlines()[-1]


async def test_containers_of_a_killed_service_go(tmp_path: Path) -> None:
    owner = _kill_a_service("with guard")
    assert await _until(lambda: not _own_containers(owner))


async def test_the_next_service_removes_what_no_guard_removed() -> None:
    owner = _kill_a_service("without guard")
    assert len(_own_containers(owner)) == 1
    sandbox = await open_sandbox(CONFIG, "next")
    assert _own_containers(owner) == []
    await sandbox.close()


@pytest.mark.parametrize(
    ("changes", "words"),
    [({"image": "tailrace/none"}, "no image 'tailrace/none'"), ({"program": "/nowhere"}, "/nowhere")],
)
async def test_what_is_missing_is_named_at_the_start(changes: dict[str, str], words: str) -> None:
    docker = msgspec.structs.replace(CONFIG.docker, **changes)
    with pytest.raises(ConfigError, match=r"sandbox\.docker") as refused:
        await open_sandbox(msgspec.structs.replace(CONFIG, docker=docker), "test")
    assert words in str(refused.value)


async def test_a_daemon_that_does_not_answer_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOCKER_HOST", "unix:///nowhere/docker.sock")
    with pytest.raises(ConfigError, match="reaches no Docker daemon"):
        await open_sandbox(CONFIG, "test")
    assert (await Docker(PROGRAM).order("version"))[0] != 0
