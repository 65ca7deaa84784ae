"""Attacks on what calls share: processors, memory of the kernel, the service that runs them.

Each was possible once, or is a close relative. Like the escape suite they run on the bare machine and
in an unprivileged container.
"""

# ruff: noqa: E501 - programs read better with lines as they are

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tailrace_sandbox.adapters.tools import PythonSessionTool, PythonTool
from tailrace_sandbox.config import SandboxConfig
from tailrace_sandbox.ports import Execution, SandboxSession, Work
from tests.integration.sandbox.attempts import calling
from tests.integration.sandbox.box import CONFIG, LIMITS, Box
from tests.world.processes import is_alive

# What a stopped process may arm. Each prints nothing and counts `runs` up when it gets to run.
_COUNT = (
    "import os, signal, time, threading\nruns = 0\ndef count(*_):\n    global runs\n    runs += 1\n"
)
ARMED = {
    "posix timer": calling(
        _COUNT + "signal.signal(signal.SIGCONT, count)\n"
        "event = (ctypes.c_int * 16)(0, 0, 18, 0)\nnumber = ctypes.c_int()\n"
        "if call(222, 107, 1, event, ctypes.byref(number)) == 0:\n"
        "    spec = (ctypes.c_long * 4)(0, 20_000_000, 0, 20_000_000)\n"
        "    call(223, 110, number.value, 0, spec, None)\n"
    ),
    "interval timer": _COUNT + "signal.signal(signal.SIGALRM, count)\n"
    "signal.setitimer(signal.ITIMER_REAL, 0.02, 0.02)\n",
    "thread": _COUNT + "def spin():\n    while True: count()\n"
    "threading.Thread(target=spin, daemon=True).start()\n",
    "helper that continues its parent": _COUNT + "signal.signal(signal.SIGCONT, count)\n"
    "if os.fork() == 0:\n"
    "    while True:\n        try: os.kill(os.getppid(), signal.SIGCONT)\n        except OSError: pass\n",
    "child whose end continues its parent": calling(
        _COUNT + "signal.signal(signal.SIGCONT, count)\n"
        "for _ in range(8):\n    if call(56, 220, 18, 0, 0, 0, 0) == 0:\n        time.sleep(0.05); os._exit(0)\n"
    ),
    "readable pipe": _COUNT + "import fcntl\nr, w = os.pipe()\n"
    "try: fcntl.fcntl(r, 10, signal.SIGCONT)\nexcept OSError: pass\n"
    "try: fcntl.fcntl(r, fcntl.F_SETOWN, os.getpid())\nexcept OSError: pass\n"
    "fcntl.fcntl(r, fcntl.F_SETFL, os.O_ASYNC)\nsignal.signal(signal.SIGCONT, count)\nos.write(w, b'x')\n",
}


@pytest.fixture(scope="module")
def stopped() -> Iterator[Box]:
    made = Box(SandboxConfig(limits=LIMITS, max_concurrency=1, max_sessions=len(ARMED) + 2))
    yield made
    made.close()


def _read(path: Path) -> str:
    """A file below `/proc`; empty when its process or thread has ended."""
    try:
        return path.read_text()
    except (FileNotFoundError, ProcessLookupError):
        return ""


def _threads(pid: int) -> list[Path]:
    """Entries of a process's threads; none when it has ended."""
    try:
        return sorted(Path(f"/proc/{pid}/task").iterdir())
    except (FileNotFoundError, ProcessLookupError):
        return []


def _children(pid: int) -> list[int]:
    found = (_read(thread / "children") for thread in _threads(pid))
    return [int(child) for children in found for child in children.split()]


def _descendants(pid: int) -> Iterator[int]:
    for child in _children(pid):
        yield child
        yield from _descendants(child)


def _switches(pids: list[int]) -> list[str]:
    """How often each thread of these processes came to run; empty as long as one is not stopped."""
    texts = [_read(thread / "status") for pid in pids for thread in _threads(pid)]
    states = [text.partition("\nState:\t")[2][:1] for text in texts]
    if not all(state in "TZX" for state in states):
        return []
    return [line for text in texts for line in text.splitlines() if "ctxt_switches" in line]


def _process_of(session: SandboxSession) -> int:
    return int(session._zygote._process.pid)  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", ARMED)
def test_a_stopped_session_is_not_woken_by_a(name: str, stopped: Box) -> None:
    session = stopped.wait(stopped.runner.open_session())
    try:
        outcome = stopped.wait(session.execute(Work("session", ARMED[name], 30.0)))
        assert not outcome.reason, outcome
        pids = list(_descendants(_process_of(session)))
        deadline_s = time.monotonic() + 60
        before, now = [""], _switches(pids)
        while (not now or before != now) and time.monotonic() < deadline_s:
            time.sleep(0.1)  # until the stop reached every thread
            before, now = now, _switches(pids)
        time.sleep(0.5)
        assert now, "the session is there"
        assert _switches(pids) == now
        outcome = stopped.wait(session.execute(Work("session", "print('back')", 30.0)))
        assert outcome.stdout.endswith("back\n"), outcome
    finally:
        stopped.wait(session.close())


GREEDY = {
    "socket buffers": (
        "import os, socket, time\nfor _ in range(10):\n    if os.fork() == 0: break\nkept = []\n"
        "try:\n    while True: kept.append(socket.socketpair())\nexcept OSError: pass\n"
        "for pair in kept:\n    for s in pair:\n        s.setblocking(False)\n"
        "        try: s.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 30)\n        except OSError: pass\n"
        "        try:\n            while True: s.send(bytes(1 << 16))\n        except OSError: pass\ntime.sleep(9)"
    ),
    "pipes": (
        "import os, time\nfor _ in range(10):\n    if os.fork() == 0: break\n"
        "for _ in range(22):\n    r, w = os.pipe(); os.set_blocking(w, False)\n"
        "    try:\n        while True: os.write(w, bytes(4096))\n    except OSError: pass\n"
        "x = bytearray(b'x' * (9 << 20))\ntime.sleep(9)"
    ),
    "pages that processes shared until they wrote to them": (
        "import os, time\nx = bytearray(b'x' * (20 << 20))\nfor _ in range(9):\n    if os.fork() == 0: break\n"
        "time.sleep(0.5)\nfor i in range(0, len(x), 4096): x[i] = 1\ntime.sleep(9)"
    ),
    "memory behind a first thread that ended": calling(
        "import os, threading, time\ndef hold():\n    time.sleep(0.2)\n"
        "    x = bytearray((70 if os.fork() else 40) << 20)\n"
        "    for i in range(0, len(x), 4096): x[i] = 1\n    time.sleep(9)\n"
        "threading.Thread(target=hold).start()\ncall(60, 93, 0)\n"
    ),
}


@pytest.mark.parametrize("name", GREEDY)
def test_memory_is_counted_when_it_is_in(name: str, box: Box) -> None:
    assert box.python(GREEDY[name]).reason == "memory"
    assert box.python("print(1)").is_ok


def test_many_mappings_do_not_hide_what_a_call_takes(box: Box) -> None:
    bomb = (
        "import mmap, os, time\nfor _ in range(7):\n    if os.fork() == 0: break\nkept = []\n"
        "try:\n    for n in range(60_000):\n"
        "        kept.append(mmap.mmap(-1, 4096, flags=0x22, prot=1 + n % 2))\n"
        "except OSError: pass\nx = bytearray(40 << 20)\nfor i in range(0, len(x), 4096): x[i] = 1\ntime.sleep(9)"
    )
    assert box.python(bomb).reason in ("mappings", "memory"), "while it ran"
    assert box.python("print(1)").is_ok


HIDDEN = {
    "by a program that still runs": (
        "import os, shutil, time\nfor n in range(8):\n    shutil.copy('/bin/sleep', f'f{n}')\n"
        "    with open(f'f{n}', 'ab') as f: f.write(os.urandom(3 << 20))\n    os.chmod(f'f{n}', 0o755)\n"
        "    if os.fork() == 0: os.execv(f'./f{n}', ['s', '9'])\n"
        "    time.sleep(0.2); os.unlink(f'f{n}')\ntime.sleep(9)"
    ),
    "by a mapping of its first page": (
        "import mmap, os, time\nkept = []\nfor n in range(8):\n    f = open('f', 'w+b')\n"
        "    f.write(os.urandom(3 << 20)); f.flush(); kept.append(mmap.mmap(f.fileno(), 4096))\n"
        "    os.unlink('f'); f.close(); time.sleep(0.2)\ntime.sleep(9)"
    ),
}


_RUNS_OWN = (
    "import os, shutil\nshutil.copy('/bin/true', 't'); os.chmod('t', 0o755); os.execv('./t', ['t'])"
)


@pytest.mark.parametrize("name", HIDDEN)
def test_a_deleted_file_counts_whole_that_is_held(name: str, box: Box) -> None:
    if name == "by a program that still runs" and not box.python(_RUNS_OWN).is_ok:
        pytest.skip("no program runs from the folder of a call here (noexec)")
    assert box.python(HIDDEN[name]).reason == "disk"


def test_no_room_on_disk_is_taken_at_once_and_libraries_write_it_instead(box: Box) -> None:
    code = calling(
        "f = os.open('f', os.O_CREAT | os.O_RDWR)\nz = ctypes.c_long\n"
        "print(libc.fallocate(f, 1, z(0), z(1 << 30)), os.fstat(f).st_blocks)\n"
        "os.posix_fallocate(f, 0, 9000)\nprint(os.fstat(f).st_size)"
    )
    assert box.python(code).stdout == "-1 0\n9000\n"


_WATCHES = """
import os, select, time
polls = [select.epoll() for _ in range(14)]
watched = [fd for _ in range(5) for fd in os.pipe()]
for fd in watched:
    for number in range({first}, 48):
        os.dup2(fd, number)
        for poll in polls: poll.register(number, 0)
time.sleep({sleep_s})
"""


def test_what_epolls_watch_has_a_limit(box: Box) -> None:
    """Their memory is the kernel's: a call of 8 processes had 95 MiB of it."""
    assert box.python(_WATCHES.format(first=40, sleep_s=0.3)).is_ok
    begin = "import os\nfor _ in range(4):\n    if os.fork() == 0: break\n"
    told = box.wait(
        PythonTool(box.runner, CONFIG).execute(
            {"code": begin + _WATCHES.format(first=36, sleep_s=20), "timeout_s": 30}
        )
    )
    assert told.content == "[ended because its epolls watched more than 4096 descriptors]"


def test_locks_of_ranges_take_no_memory_and_seem_to_work(box: Box) -> None:
    code = (
        "import fcntl, os\nf = open('f', 'wb')\nfor n in range(1000): fcntl.lockf(f, fcntl.LOCK_EX, 1, 2 * n)\n"
        "if os.fork() == 0:\n    fcntl.lockf(open('f', 'wb'), fcntl.LOCK_EX | fcntl.LOCK_NB); os._exit(0)\n"
        "print(os.wait()[1])"
    )
    assert box.python(code).stdout == "0\n"


def test_files_that_a_thread_has_for_itself_cannot_be_had(box: Box) -> None:
    code = calling(
        "print(call(56, 220, 0x10900, 0, 0, 0, 0) < 0, call(436, 436, 900, 901, 2) < 0, call(436, 436, 900, 901, 0))"
    )
    assert box.python(code).stdout == "True True 0\n"


FORGED = {
    "sixteen megabytes of brackets": "data = b'[' * (16 << 20)",
    "a size beyond all bounds": "data = b''; size = 0xffffffff",
    "more names than there are": "data = struct.pack('<iHH', 0, 65535, 65535) + bytes(12 << 20)",
    "a name that is longer than the answer": "data = struct.pack('<iHHHI', 0, 1, 0, 65535, 0xffffffff)",
    "an answer that is too short": "data = b'x'",
    "half characters": "data = struct.pack('<iHHHI', 0, 1, 0, 2, 0) + b'\\xed\\xa0'",
    "nothing, slowly": "data = b'x' * 40; size = 1 << 20",
}


@pytest.mark.parametrize("name", FORGED)
def test_a_forged_answer_neither_stops_the_service_nor_fails_the_episode(name: str, box: Box) -> None:
    code = (
        f"import os, struct\nsize = None\n{FORGED[name]}\n"
        "data = struct.pack('<I', len(data) if size is None else size) + data\n"
        "while data: data = data[os.write(3, data):]\nos._exit(0)"
    )

    async def scenario() -> tuple[Any, Any, float]:
        tool = PythonSessionTool(box.runner, SandboxConfig(limits=LIMITS))
        worst_s = 0.0

        async def watch() -> None:
            """Measure processor time: a busy machine takes none of it."""
            nonlocal worst_s
            while True:
                began_s = time.thread_time()
                await asyncio.sleep(0.01)
                worst_s = max(worst_s, time.thread_time() - began_s)

        watching = asyncio.create_task(watch())
        forged = await tool.execute({"code": code, "outputs": ["*"]})
        after = await tool.execute({"code": "print('next')"})
        watching.cancel()
        await tool.release()
        return forged, after, worst_s

    forged, after, worst_s = box.wait(scenario())
    assert json.loads(forged.content)["exit_code"] <= 0
    assert after.content.endswith("next") or "new one" in after.content
    assert worst_s < 1.0, "the service's loop went on (it stood still for 13 s)"


def test_a_lost_session_tells_the_model_and_begins_anew(box: Box) -> None:
    async def scenario() -> list[Any]:
        tool = PythonSessionTool(box.runner, SandboxConfig(limits=LIMITS))
        await tool.execute({"code": "x = 1"})
        parent = psutil.Process(_process_of(tool._session))  # type: ignore[arg-type]
        killed = [parent, *parent.children(recursive=True)]
        parent.kill()
        deadline_s = time.monotonic() + 60
        while any(is_alive(one) for one in killed):
            assert time.monotonic() < deadline_s
            await asyncio.sleep(0.01)
        results = [await tool.execute({"code": "x"}), await tool.execute({"code": "1 + 1"})]
        await tool.release()
        return results

    lost, after = box.wait(scenario())
    assert "the session was lost" in lost.content
    assert "new one" in lost.content
    assert lost.is_error
    assert after.content == "2"


MESSAGES = {
    "import os; os.kill(os.getpid(), 40)": "[ended by SIGRTMIN+6]",
    "import os; os.kill(os.getpid(), 9)": "[ended by SIGKILL]",
    "import urllib.request as u; u.urlopen('http://1.2.3.4')": "[the sandbox has no network]",
    "import urllib.request as u; u.urlopen('http://example.org')": "[the sandbox has no network]",
}


@pytest.mark.parametrize("code", MESSAGES)
def test_what_happened_is_told_in_words(code: str, box: Box) -> None:
    tool = PythonTool(box.runner, SandboxConfig(limits=LIMITS))
    assert MESSAGES[code] in box.wait(tool.execute({"code": code})).content


def test_a_session_that_is_interrupted_or_ended_says_so(box: Box) -> None:
    async def scenario() -> list[str]:
        tool = PythonSessionTool(box.runner, SandboxConfig(limits=LIMITS))
        stubborn = "import signal\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\nwhile True: pass"
        codes = ["while True: pass", stubborn]
        results = [await tool.execute({"code": code, "timeout_s": 0.5}) for code in codes]
        await tool.release()
        return [result.content for result in results]

    interrupted, ended = box.wait(scenario())
    assert "[interrupted because it took longer than 0.5 s; variables are kept]" in interrupted
    assert "[the session is over; the next call starts a new one" in ended


BAD_FILES: dict[str, Any] = {"/etc/x": "a", "../x": "a", "": "a", "a": {"base64": "!!"}, "b": "\ud800"}


@pytest.mark.parametrize("name", BAD_FILES)
def test_a_bad_file_is_named(name: str, box: Box) -> None:
    tool = PythonTool(box.runner, SandboxConfig(limits=LIMITS))
    with pytest.raises(ValueError, match="files: ") as caught:
        box.wait(tool.execute({"code": "", "files": {name: BAD_FILES[name]}}))
    assert repr(name) in str(caught.value)


@pytest.mark.parametrize("name", ["a/b", "d/" * 1990 + "f", "f" * 300])
def test_a_file_that_cannot_be_written_is_named(name: str, box: Box) -> None:
    outcome = box.python("print('ran')", files={"a": b"x", name: b"y"})
    assert (outcome.exit_code, outcome.stdout) == (1, "")
    assert outcome.stderr.startswith(f"files: cannot write {name!r}")


def test_a_call_whose_process_is_lost_runs_again_and_the_second_time_is_its_own(box: Box) -> None:
    named = "import ctypes, time; ctypes.CDLL(None).prctl(15, b'victim'); time.sleep(2)"

    async def killed(times: int) -> Execution:
        running = asyncio.create_task(box.runner.run(Work("python", named, 30.0)))
        for _ in range(times):
            while not (victims := [pid for pid in _grandchildren() if _name(pid) == "victim"]):
                await asyncio.sleep(0.01)
            os.kill(_parent(victims[0]), 9)
            while _alive(victims[0]):
                await asyncio.sleep(0.01)
        return await running

    assert box.wait(killed(1)).is_ok
    assert box.wait(killed(2)).reason == "lost"


def _grandchildren() -> list[int]:
    return [pid for zygote in _children(os.getpid()) for pid in _children(zygote)]


def _name(pid: int) -> str:
    return _read(Path(f"/proc/{pid}/comm")).strip()


def _parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def _alive(pid: int) -> bool:
    """Tells whether it runs; in a container nobody may wait for orphans."""
    return _read(Path(f"/proc/{pid}/stat")).rpartition(")")[2][1:2] not in ("", "Z", "X")
