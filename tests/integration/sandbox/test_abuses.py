"""Attacks on what calls share: none gets it, none passes a limit, none costs its neighbours a call.

They run on the bare machine and, by `make test-sandbox-container`, in an unprivileged container.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

import pytest

from tailrace_sandbox.adapters.tools import PythonSessionTool
from tailrace_sandbox.config import CallLimits, SandboxConfig
from tailrace_sandbox.engine.start import SHARED_USER_HEADROOM
from tests.integration.sandbox.abuses import GRABS, GROWTHS, HOGS
from tests.integration.sandbox.box import CONFIG, LIMITS, MIB, Box
from tests.integration.sandbox.conftest import SECRET, Outside

WALL_S = 1.5
IN_SESSIONS = (
    "forks without an end", "zombies", "sockets full of bytes", "a JSON bomb", "a deep pickle",
    "a flood of both outputs", "a folder that grows names", "a stop of itself", "an exec of itself",
    "a quit of everything", "a limit of its own at zero", "mappings that split",
)  # fmt: skip


@pytest.mark.parametrize("name", GRABS, ids=lambda name: name.replace(" ", "-"))
def test_a_call_does_not_get(name: str, box: Box, outside: Outside) -> None:
    outcome = box.python(outside.fill(GRABS[name]))
    assert "ESCAPED" not in outcome.stdout, outcome
    assert SECRET not in outcome.stdout + outcome.stderr
    assert outcome.reason == "", "it must fail by itself, not by running out of something"
    assert not (outside.folder / "new").exists()
    assert outside.victim.poll() is None


class Peak:
    """Most processes and memory that the descendants of this process had, sampled meanwhile.

    Pages that forked processes share count once, as the machine has them once. Memory is not told by
    samples in which processes came or ended: their pages were counted with their heirs', too. A zombie
    is still listed, and its pages are gone.
    """

    def __init__(self) -> None:
        self.num_processes = self.memory_bytes = self.huge_bytes = 0
        self._outside = set(_descendants())
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._watch)

    def __enter__(self) -> Peak:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._is_over.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._is_over.wait(0.002):
            inside = set(_descendants()) - self._outside
            held = {pid: _held(pid) for pid in inside}
            threads, memory, huge = map(sum, zip((0, 0, 0), *held.values(), strict=True))
            self.num_processes = max(self.num_processes, threads)
            self.huge_bytes = max(self.huge_bytes, huge)
            are_alive = all(_has_memory(pid) for pid, (_, num_bytes, _) in held.items() if num_bytes)
            if are_alive and inside == set(_descendants()) - self._outside:
                self.memory_bytes = max(self.memory_bytes, memory)


def _descendants() -> Iterator[int]:
    waiting = [os.getpid()]
    while waiting:
        threads: list[Path] = []
        with suppress(FileNotFoundError, ProcessLookupError):  # it ended meanwhile
            threads = list(Path(f"/proc/{waiting.pop()}/task").iterdir())
        for thread in threads:
            with suppress(FileNotFoundError, ProcessLookupError):
                found = [int(pid) for pid in (thread / "children").read_text().split()]
                yield from found
                waiting += found


def _held(pid: int) -> tuple[int, int, int]:
    """Threads, bytes of memory and of huge pages; nothing for a process that ended."""
    try:
        threads = len(os.listdir(f"/proc/{pid}/task"))
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return 0, 0, 0
    kib = {line.split()[0]: line.split()[1] for line in lines[1:]}
    return threads, 1024 * int(kib.get("Pss_Anon:", 0)), 1024 * int(kib.get("AnonHugePages:", 0))


def _has_memory(pid: int) -> bool:
    try:
        return not Path(f"/proc/{pid}/statm").read_text().startswith("0 ")
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.mark.parametrize("name", HOGS, ids=lambda name: name.replace(" ", "-"))
def test_a_call_takes_no_more_than_its_share_by(name: str, box: Box) -> None:
    assert box.python("print('before')").stdout == "before\n"
    with Peak() as peak:
        outcome = box.python(HOGS[name], wall_s=WALL_S)
    assert outcome.reason != "lost", "it ended in time"
    assert len(outcome.stdout) <= LIMITS.max_output_bytes
    assert peak.memory_bytes <= 1.1 * LIMITS.memory_bytes, outcome
    # Without a user of its own and without a fork gate, the kernel's limit has room for others.
    features = box.place.features
    room = 0 if features.own_user or features.counts_forks else SHARED_USER_HEADROOM
    assert peak.num_processes <= 1.1 * LIMITS.max_processes + room, outcome
    assert box.python("print('after')").stdout == "after\n"
    assert box.leaves_no_folder()


@pytest.fixture(scope="module")
def default_box() -> Iterator[Box]:
    made = Box(SandboxConfig(max_concurrency=1))
    yield made
    made.close()


_FRESH = (
    "import mmap, os, time\nfor _ in range(11):\n    if os.fork() == 0: break\n"
    f"m = mmap.mmap(-1, {256 * MIB}, flags=0x22)\n"
    f"for i in range(0, {256 * MIB}, 4096): m[i] = 1\ntime.sleep(25)"
)
_SHARED = (
    "import os, time\nbegin = time.monotonic() + 1.5\n"
    f"x = bytearray(b'x' * {5 * MIB})\nfor _ in range(30):\n    if os.fork() == 0: break\n"
    f"time.sleep(max(0, begin - time.monotonic()))\nx[:] = bytes({5 * MIB})\n"
    f"y = b'y' * {25 * MIB}\ntime.sleep(25)"
)


_SHARERS = (
    "import os, time\nfor _ in range(4):\n    if os.fork() == 0: break\n"
    f"x = bytearray(b'x' * {160 * MIB})\nend = time.time() + 25\n"
    "while time.time() < end:\n    if os.fork() == 0: os._exit(0)\n    os.wait()"
)


@pytest.mark.parametrize(
    "bomb",
    [_FRESH, _SHARED, _SHARERS],
    ids=["fresh", "shared-before", "sharers-that-come-and-go"],
)
def test_memory_of_many_processes_stays_within_a_tenth_of_the_default_limit(
    bomb: str, default_box: Box
) -> None:
    default_box.python("print('before')")
    with Peak() as peak:
        outcome = default_box.python(bomb, wall_s=30.0)
    assert outcome.reason == "memory"
    assert peak.memory_bytes <= 1.1 * CallLimits().memory_bytes


@pytest.mark.parametrize("name", GROWTHS, ids=lambda name: name.replace(" ", "-"))
def test_a_call_that_grows_after_a_rest_ends_at_its_limit_by(name: str, default_box: Box) -> None:
    with Peak() as peak:
        outcome = default_box.python(GROWTHS[name], wall_s=30.0)  # they rest for 25 s
    assert outcome.reason == "memory", outcome
    assert peak.memory_bytes <= 1.1 * CallLimits().memory_bytes
    assert peak.huge_bytes == 0 or default_box.place.groups is not None
    assert default_box.python("print('after')").stdout == "after\n"


_NEIGHBOUR = (
    "import mmap\nprint(flush=True)\nwhile True:\n"
    f"    m = mmap.mmap(-1, {256 * MIB}, flags=0x8022); m.close()"  # its pages come with the mapping
)


def test_calls_end_at_their_limit_while_a_neighbour_frees_as_much(default_box: Box) -> None:
    growth = GROWTHS["pages that come with their mapping"]
    with subprocess.Popen([sys.executable, "-c", _NEIGHBOUR], stdout=subprocess.PIPE) as neighbour:
        assert neighbour.stdout is not None
        neighbour.stdout.readline()
        default_box.python("print('before')")
        with Peak() as peak:
            outcomes = [default_box.python(growth, wall_s=30.0) for _ in range(3)]
        neighbour.kill()
    assert [outcome.reason for outcome in outcomes] == 3 * ["memory"]
    assert peak.memory_bytes <= 1.1 * CallLimits().memory_bytes


@pytest.mark.parametrize("name", IN_SESSIONS, ids=lambda name: name.replace(" ", "-"))
def test_a_session_tells_its_model_and_fails_no_episode_by(name: str, box: Box) -> None:
    async def scenario() -> tuple[Any, Any]:
        tool = PythonSessionTool(box.runner, CONFIG)
        hogged = await tool.execute({"code": HOGS[name], "timeout_s": 1.0})
        after = await tool.execute({"code": "print('on')", "timeout_s": 30.0})
        await tool.release()
        return hogged, after

    hogged, after = box.wait(scenario())
    assert hogged.content or not hogged.is_error
    assert after.content.endswith("on") or "new one" in after.content, (hogged, after)
    assert box.python("print('after')").stdout == "after\n"
