"""Calls in cgroups of their own, on a machine where cgroup v2 is delegated to the tests.

For example `systemd-run --user --scope -p Delegate=yes make test`; elsewhere they say why they skip.
"""

# ruff: noqa: E501 - programs read better with lines as they are

from __future__ import annotations

import asyncio
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tailrace_sandbox.adapters.groups import Groups
from tailrace_sandbox.adapters.tools import PythonSessionTool, PythonTool
from tailrace_sandbox.config import SandboxConfig
from tailrace_sandbox.core.cgroups import NotDelegatedError, values
from tailrace_sandbox.ports import Work
from tests.integration.sandbox.box import LIMITS, MIB, Box

CONFIG = SandboxConfig(limits=LIMITS, max_concurrency=2, max_sessions=2)
OVER = f"{LIMITS.memory_bytes} bytes of memory"


@pytest.fixture(scope="module")
def grouped() -> Iterator[Box]:
    box = Box(CONFIG)
    try:
        if box.place.groups is None:
            with pytest.raises(NotDelegatedError) as why:
                Groups.open()
            pytest.skip(f"cgroup v2 is not delegated: {why.value}")
        yield box
    finally:
        box.close()


def _groups(box: Box) -> list[Path]:
    assert box.place.groups is not None
    return sorted(box.place.groups.path.glob("zygote-*"))


def _calls(box: Box, *codes: str) -> list[str]:
    """Results of calls that run at once, as a model sees them."""

    async def scenario() -> list[str]:
        tool = PythonTool(box.runner, CONFIG)
        results = await asyncio.gather(*(tool.execute({"code": code}) for code in codes))
        return [result.content for result in results]

    return box.wait(scenario())


# Many small processes, of which none is large, so that no limit of a single process ends them.
HOG = (
    "import mmap, os, time\nfor _ in range({forks}):\n    if os.fork() == 0: break\n"
    "m = mmap.mmap(-1, {mib} << 20, flags=0x22)\nfor i in range(0, {mib} << 20, 4096): m[i] = 1\n"
    "time.sleep(60)"
)
SHARERS = (
    "import os, time\nx = b'x' * (11 << 20)\npids = []\nfor _ in range(11):\n    pid = os.fork()\n"
    "    if pid == 0:\n        time.sleep(1); os._exit(x[-1] != 120)\n    pids.append(pid)\n"
    "print([os.waitpid(pid, 0)[1] for pid in pids])"
)
_FORKS = "import os, socket, time\nfor _ in range(11):\n    if os.fork() == 0: break\nkept = []\n"
KERNEL = {  # 16 MiB and more
    "pipes": _FORKS
    + "for _ in range(22):\n    r, w = os.pipe(); os.set_blocking(w, False); kept.append(r)\n"
    "    try:\n        while True: os.write(w, bytes(4096))\n    except OSError: pass\n",
    "sockets": _FORKS
    + "for _ in range(4): kept += socket.socketpair()\nfor s in kept:\n    s.setblocking(False)\n"
    "    try:\n        while True: s.send(bytes(1 << 15))\n    except OSError: pass\n",
}
_TOUCH = "x = bytearray({mib} << 20)\nfor i in range(0, len(x), 4096): x[i] = 1\n"
_REST = _TOUCH.format(mib=6) + "time.sleep({sleep_s})"  # 72 MiB in all


def test_pages_that_processes_share_count_once(grouped: Box) -> None:
    outcome = grouped.python(SHARERS)
    assert outcome.stdout == f"{[0] * 11}\n", outcome
    assert outcome.is_ok


def test_memory_beyond_the_limit_ends_the_call_alone_and_is_told(grouped: Box) -> None:
    neighbour = "import time\nx = bytearray(b'x' * (40 << 20))\ntime.sleep(2)\nprint(len(x))"
    _calls(grouped, "1", "import time; time.sleep(1)")  # both zygotes are there
    before = _groups(grouped)
    hogged, beside = _calls(grouped, HOG.format(forks=9, mib=30), neighbour)
    assert OVER in hogged
    assert beside == str(40 << 20)
    assert _groups(grouped) == before, "no zygote died"
    assert grouped.python("print('after')").stdout == "after\n"


def test_a_call_that_the_kernel_ends_for_its_memory_is_told_so_and_its_zygote_lives(
    grouped: Box,
) -> None:
    """The limit of the kernel is set below that of the checks, so that it is the one that holds."""
    grouped.wait(grouped.runner.close_processes())
    assert grouped.python("1").is_ok
    (path,) = _groups(grouped)
    zygote = (path / "cgroup.procs").read_text()
    (path / "memory.max").write_text(str(60 * MIB))
    for _ in range(3):
        killed = _ooms(path)
        outcome = grouped.python(HOG.format(forks=9, mib=9))
        assert outcome.reason == "memory"
        assert _ooms(path) > killed
        assert grouped.python("print('after')").stdout == "after\n"
    assert (path / "cgroup.procs").read_text() == zygote
    grouped.wait(grouped.runner.close_processes())


def _ooms(path: Path) -> int:
    return values((path / "memory.events").read_text())["oom_kill"]


@pytest.mark.parametrize("kind", KERNEL)
def test_memory_of_the_kernel_counts_with_that_of_processes(kind: str, grouped: Box) -> None:
    assert grouped.python(KERNEL[kind] + "time.sleep(0.3)").is_ok, "fits"
    assert grouped.python(_FORKS + _REST.format(sleep_s=0.3)).is_ok, "fits too"
    assert grouped.python(KERNEL[kind] + _REST.format(sleep_s=60)).reason == "memory"


def test_a_call_has_as_many_processes_as_its_limit_says(grouped: Box) -> None:
    code = (
        "import os, time\nnumber = 1\nwhile True:\n    try: pid = os.fork()\n    except BlockingIOError: break\n"
        "    if pid == 0: time.sleep(60); os._exit(0)\n    number += 1\nprint(number)"
    )
    assert grouped.python(code).stdout == f"{LIMITS.max_processes}\n"


def test_a_call_cannot_change_or_leave_its_group(grouped: Box) -> None:
    grouped.wait(grouped.runner.close_processes())
    assert grouped.python("1").is_ok
    (path,) = _groups(grouped)
    names = [str(file) for folder in (path, *path.parents[:2]) for file in folder.iterdir()]
    assert str(path / "memory.max") in names
    code = f"import os\nfor name in {names!r}:\n    for mode in (os.O_WRONLY, os.O_RDONLY):\n        try: os.open(name, mode)\n        except OSError: continue\n        print(name, mode)"
    assert grouped.python(code).stdout == ""


def test_a_session_that_runs_out_of_memory_says_so_and_the_next_call_starts_a_new_one(
    grouped: Box,
) -> None:
    async def scenario() -> list[Any]:
        tool = PythonSessionTool(grouped.runner, CONFIG)
        codes = ("x = 1", HOG.format(forks=9, mib=30), "1 + 1")
        results = [await tool.execute({"code": code}) for code in codes]
        await tool.release()
        return [result.content for result in results]

    _, hogged, after = grouped.wait(scenario())
    assert OVER in hogged
    assert "new one" in hogged
    assert after == "2"


def test_files_of_a_call_do_not_use_up_its_memory(grouped: Box) -> None:
    code = (
        f"open('f', 'wb').write(bytes({LIMITS.disk_bytes - MIB}))\n"
        + _TOUCH.format(mib=80)
        + "import time; time.sleep(0.5)\nprint(len(x))"
    )
    assert grouped.python(code).stdout == f"{80 << 20}\n"


def test_no_group_outlives_its_service(grouped: Box) -> None:
    box = Box(CONFIG)
    assert box.python("print(1)").is_ok
    assert box.place.groups is not None
    path = box.place.groups.path
    assert len(_groups(box)) == 1
    session = box.wait(box.runner.open_session())
    assert box.wait(session.execute(Work("session", "1", 30.0))).is_ok
    assert len(_groups(box)) == 2
    box.wait(session.close())
    assert len(_groups(box)) == 1
    box.close()
    assert not path.exists()


def test_groups_of_a_killed_service_go_when_the_next_one_starts(grouped: Box) -> None:
    left = Groups.open()
    inner = left.make()
    child = subprocess.Popen(["/bin/sleep", "600"])
    (inner.path / "cgroup.procs").write_text(str(child.pid))
    os.close(left._lock)  # as the kernel does for a process that ends
    Groups.open().close()
    assert child.wait(60) == -9
    Groups.open().close()  # what was dying then is gone now
    assert not left.path.exists()
    assert grouped.place.groups is not None
    assert grouped.place.groups.path.exists(), "that of a living one stays"
