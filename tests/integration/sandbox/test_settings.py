"""Effects of the keys of the section `sandbox` inside a call."""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tailrace_sandbox.adapters.tools import PythonSessionTool, PythonTool
from tailrace_sandbox.config import CallLimits, SandboxConfig
from tailrace_sandbox.ports import Execution, SandboxSession, Work
from tests.integration.sandbox.box import Box

LIMITS = CallLimits(
    max_output_bytes=400,
    max_transfer_bytes=1000,
    max_open_files=20,
    wall_s=1.0,
    max_wall_s=45.0,
    cpu_s=77,
    max_mappings=150,
)
FIRST_UID = 71_000


@dataclass(frozen=True)
class Tuned:
    """A sandbox whose every setting differs from the default."""

    box: Box
    folder: Path
    config: SandboxConfig


@pytest.fixture(scope="module")
def tuned() -> Iterator[Tuned]:
    with tempfile.TemporaryDirectory(prefix="tuned-") as name:
        folder = Path(name)
        folder.chmod(0o755)
        (folder / "data").mkdir()
        (folder / "data" / "file").write_text("given")
        (folder / "data" / "file").chmod(0o666)
        config = SandboxConfig(
            limits=LIMITS,
            max_concurrency=1,
            max_sessions=1,
            first_uid=FIRST_UID,
            preload=("colorsys",),
            readable=(str(folder / "data"),),
            workspace_dir=str(folder),
            tool_limits={
                "shell": {"max_output_bytes": 500, "max_transfer_bytes": 2000, "max_open_files": 30},
                "python_session": {"wall_s": 20.0, "max_output_bytes": 600},
            },
        )
        box = Box(config)
        yield Tuned(box, folder, config)
        box.close()


def test_preloaded_modules_are_imported_already(tuned: Tuned, box: Box) -> None:
    code = "import sys; print('colorsys' in sys.modules)"
    assert tuned.box.python(code).stdout == "True\n"
    assert box.python(code).stdout == "False\n"


def test_random_numbers_differ_beside_preloaded_modules_too(tuned: Tuned) -> None:
    code = "import random; print(random.random())"
    assert tuned.box.python(code).stdout != tuned.box.python(code).stdout


def test_what_is_readable_can_be_read_and_not_written(tuned: Tuned, box: Box) -> None:
    path = tuned.folder / "data" / "file"
    assert tuned.box.python(f"print(open({str(path)!r}).read())").stdout == "given\n"
    assert "PermissionError" in tuned.box.python(f"open({str(path)!r}, 'a')").stderr
    assert "PermissionError" in box.python(f"open({str(path)!r})").stderr


def test_folders_of_calls_are_made_where_the_configuration_says(tuned: Tuned) -> None:
    assert tuned.box.python("import os; print(os.getcwd())").stdout.startswith(f"{tuned.folder}/")


def test_output_beyond_the_limit_is_cut(tuned: Tuned) -> None:
    outcome = tuned.box.python("print('x' * 1000)")
    assert (len(outcome.stdout), outcome.is_cut, outcome.is_ok) == (400, True, True)


def test_each_tool_has_limits_of_its_own_and_the_others_of_all(tuned: Tuned) -> None:
    box, config = tuned.box, tuned.config
    assert len(box.python("print('x' * 1000)").stdout) == 400
    assert len(box.shell("printf 'x%.0s' $(seq 1000)").stdout) == 500
    assert box.shell("ulimit -n; ulimit -t").stdout.split() == ["30", "77"]
    assert "Too many open files" in box.python("f = [open('/dev/null') for _ in range(25)]").stderr
    handed_out = box.shell("printf 'x%.0s' $(seq 1500) >f", outputs=("f",))
    assert len(handed_out.files["f"]) == 1500

    async def session() -> tuple[str, float]:
        tool = PythonSessionTool(box.runner, config)
        told = await tool.execute({"code": "print('x' * 1000)"})
        remembering = Remembering()
        await PythonTool(remembering, config).execute({"code": ""})
        await tool.release()
        return told.content, remembering.work.wall_s

    shown, python_wall_s = box.wait(session())
    assert shown == f"{'x' * 600}\n[output was cut]"
    assert python_wall_s == LIMITS.wall_s
    assert config.limits_of("python_session").wall_s == 20.0


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"bash": {"wall_s": 1.0}}, "tool_limits: 'bash' is none of the tools python, shell"),
        ({"shell": {"memory": 1}}, r"tool_limits\.shell: 'memory' is none of the limits wall_s"),
        ({"shell": {"wall_s": 99.0}}, r"tool_limits\.shell: .*max_wall_s"),
        ({"python": {"max_files": 0}}, r"tool_limits\.python: .*must be positive"),
        ({"python": {"max_files": 1.5}}, r"tool_limits\.python: Expected `int`"),
    ],
)
def test_limits_of_a_tool_that_cannot_be_are_named(given: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        SandboxConfig(tool_limits=given)


def test_open_files_are_limited(tuned: Tuned, box: Box) -> None:
    code = "files = [open('/dev/null') for _ in range(30)]"
    assert "Too many open files" in tuned.box.python(code).stderr
    assert box.python(code).is_ok


def test_memory_mappings_are_limited(tuned: Tuned, box: Box) -> None:
    code = (
        "import mmap, time\n"
        "kept = [mmap.mmap(-1, 4096, flags=0x22, prot=1 + n % 2) for n in range(150)]\ntime.sleep"
    )
    assert tuned.box.python(f"{code}(25)").reason == "mappings"
    assert box.python(f"{code}(0.5)").is_ok


def test_files_beyond_the_limit_are_refused_in_both_directions(tuned: Tuned) -> None:
    tool = PythonTool(tuned.box.runner, tuned.config)
    with pytest.raises(ValueError, match="more than 1000 bytes"):
        asyncio.run(tool.execute({"code": "", "files": {"f": "x" * 2000}}))
    outcome = tuned.box.python("open('f', 'wb').write(bytes(1001))", outputs=("f",))
    assert (outcome.files, outcome.refused) == ({}, ("f",))


class Remembering:
    """A sandbox that runs nothing."""

    async def run(self, work: Work) -> Execution:
        self.work = work
        return Execution(0, "", "", "", False, {}, ())

    async def open_session(self, mode: str = "session", image: str = "") -> SandboxSession:
        raise NotImplementedError

    async def start(self) -> None:
        raise NotImplementedError

    async def close(self) -> None:
        raise NotImplementedError


def test_a_call_may_not_ask_for_more_time_than_the_most(tuned: Tuned) -> None:
    assert tuned.box.runner.limits("python", 1e9).wall_s == 45.0
    sandbox = Remembering()
    asyncio.run(PythonTool(sandbox, tuned.config).execute({"code": "", "timeout_s": 1e9}))
    assert sandbox.work.wall_s == 45.0


def test_the_processor_time_of_a_process_is_limited(tuned: Tuned, box: Box) -> None:
    code = "import resource; print(resource.getrlimit(resource.RLIMIT_CPU)[0])"
    assert tuned.box.python(code).stdout == "77\n"
    assert box.python(code).stdout == "120\n"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives calls users of their own")
def test_calls_have_users_from_the_first_one_on(tuned: Tuned) -> None:
    found = int(tuned.box.python("import os; print(os.getuid())").stdout)
    assert FIRST_UID <= found < FIRST_UID + 16


def test_a_session_too_many_waits_for_one_to_end(tuned: Tuned) -> None:
    async def opens() -> bool:
        """Returns whether a session opens while another one is open."""
        first = await tuned.box.runner.open_session()
        second = asyncio.create_task(tuned.box.runner.open_session())
        done, _ = await asyncio.wait({second}, timeout=1.0)
        await first.close()
        await (await second).close()
        return bool(done)

    assert not tuned.box.wait(opens())


def test_threads_processes_and_loops_work_in_a_call(box: Box) -> None:
    code = (
        "import asyncio, os, subprocess, threading\n"
        "from concurrent.futures import ThreadPoolExecutor\n"
        "with ThreadPoolExecutor(2) as pool: print(sum(pool.map(lambda n: n * n, range(4))))\n"
        "print(subprocess.run(['echo', 'process'], capture_output=True, text=True).stdout.strip())\n"
        "print(asyncio.run(asyncio.sleep(0, 'loop')))\n"
        "print(threading.current_thread() is threading.main_thread(), flush=True)\n"
        "if os.fork() == 0: os._exit(0)\n"
        "os.wait()\n"
        "threading.Timer(0.05, lambda: print('waited for')).start()\n"
    )
    assert box.python(code).stdout.split("\n") == ["14", "process", "loop", "True", "waited for", ""]


def test_a_call_starts_with_the_signals_of_a_program(box: Box) -> None:
    code = (
        "import signal\n"
        "print(signal.getsignal(signal.SIGINT) is signal.default_int_handler,\n"
        "      signal.getsignal(signal.SIGCHLD) == signal.SIG_DFL,\n"
        "      signal.getsignal(signal.SIGTERM) == signal.SIG_DFL, signal.set_wakeup_fd(-1))"
    )
    assert box.python(code).stdout == "True True True -1\n"
