"""Sessions that turn their own interpreter against the service: each is told to its model alone."""

# ruff: noqa: E501 - programs read better with lines as they are

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Callable
from typing import Any

import psutil
import pytest

from tailrace_sandbox.adapters.tools import PythonSessionTool, PythonTool
from tailrace_sandbox.config import SandboxConfig
from tests.integration.sandbox.box import LIMITS, Box

CONFIG = SandboxConfig(limits=LIMITS)
SESSIONS = {
    "a value whose text never ends": "class A:\n    def __repr__(self):\n        while True: pass\nA()",
    "a value whose text raises": "class A:\n    def __repr__(self): raise BaseException('no text')\nA()",
    "a value whose text is no text": "class A:\n    def __repr__(self): return 7\nA()",
    "a value whose text exits": "class A:\n    def __repr__(self): raise SystemExit(3)\nA()",
    "a value with half characters": "'\\ud800' * 9",
    "a value of fifty megabytes": "'x' * 50_000_000",
    "an output that is none": "import sys\nsys.stdout = sys.stderr = None",
    "an output that raises": "import sys\nclass O:\n    def write(self, text): raise ZeroDivisionError\n    flush = write\nsys.stdout = sys.stderr = O()\nprint(1)",
    "every descriptor closed": "import os\nos.closerange(0, 48)",
    "every descriptor nowhere": "import os\nr, w = os.pipe()\nfor n in range(48):\n    try: os.dup2(w, n)\n    except OSError: pass",
    "noise in every descriptor": "import os\nfor n in range(3, 48):\n    try:\n        os.set_blocking(n, False)\n        os.write(n, b'\\xff' * 9999)\n    except OSError: pass",
    "no builtins": "import builtins\nfor name in list(vars(builtins)): delattr(builtins, name)",
    "other builtins": "import builtins\nbuiltins.compile = builtins.exec = builtins.eval = builtins.len = builtins.open = lambda *a, **k: 1 / 0",
    "no modules": "import sys\nsys.modules.clear()",
    "other modules": "import json, os, struct, traceback, io\nfor m in (json, struct, traceback, io):\n    for name in list(vars(m)):\n        try: setattr(m, name, lambda *a, **k: 1 / 0)\n        except Exception: pass",
    "no recursion": "import sys\ntry: sys.setrecursionlimit(1)\nexcept RecursionError: sys.setrecursionlimit(20)",
    "an error of a million causes": "e = None\nfor _ in range(100_000):\n    n = ValueError('x'); n.__cause__ = e; e = n\nraise e",
    "an error that is its own cause": "e = ValueError('x'); f = ValueError('y'); e.__cause__ = f; f.__cause__ = e\nraise e",
    "an error whose text raises": "class E(Exception):\n    def __str__(self): raise SystemExit\nraise E",
    "an error of no kind": "raise BaseException",
    "an end of a generator": "raise GeneratorExit",
    "an exit with a text of megabytes": "import sys\nsys.exit('x' * 5_000_000)",
    "an exit with a number of many digits": "import sys\nsys.exit(10 ** 5000)",
    "a trace of each line": "import sys\nsys.settrace(lambda *a: 1 / 0)\nsys.setprofile(lambda *a: 1 / 0)",
    "an audit hook that refuses": "import sys\ndef no(*a): raise RuntimeError(a)\nsys.addaudithook(no)",
    "a stop of itself": "import os, signal\nos.kill(os.getpid(), signal.SIGSTOP)",
    "two sessions from one": "import os\nos.fork()\nprint('both')",
    "a session whose first process ends": "import os, time\nif os.fork(): os._exit(0)\ntime.sleep(0.2)",
    "no interrupts": "import signal\nfor n in range(1, 65):\n    try: signal.signal(n, signal.SIG_IGN)\n    except (OSError, ValueError): pass\nwhile True: pass",
    "a finalizer that never ends": "class A:\n    def __del__(self):\n        while True: pass\nA()\nNone",
    "names that are not the call's": "globals().clear()\nlocals().update(__builtins__=None, exit=1)",
    "a working folder that is gone": "import os, shutil\nshutil.rmtree(os.getcwd(), ignore_errors=True)\nos.mkdir('/nowhere') if 0 else None",
    "a folder that nobody may read": "import os\nos.chmod('.', 0)",
    "an alarm that ends it": "import signal\nsignal.setitimer(signal.ITIMER_REAL, 0.05)",
    "a clock that never stops": "import signal\nclass T(Exception): pass\ndef tick(*_): raise T\nsignal.signal(signal.SIGALRM, tick)\nsignal.setitimer(signal.ITIMER_REAL, 0.01, 0.01)",
    "an interrupt from a thread": "import os, threading\nthreading.Timer(0.05, lambda: os.kill(os.getpid(), 2)).start()",
    "an interrupt at each line": "import sys\ndef stop(*_): raise KeyboardInterrupt\nsys.settrace(stop)\nx = 1",
    "no signals": "import signal\nsignal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())\nwhile True: pass",
    "no more files": "import resource\nresource.setrlimit(resource.RLIMIT_NOFILE, (3, 3))",
    "no more memory": "import resource\nresource.setrlimit(resource.RLIMIT_AS, (1 << 20, 1 << 20))",
    "no modes": "import os\nos.umask(0o777)",
    "no display": "import sys\nsys.displayhook = None",
    "imports that exit": "import sys\nclass F:\n    def find_spec(self, *_): raise SystemExit\nsys.meta_path.insert(0, F())\nsys.modules.pop('traceback', None)",
    "warnings that raise": "import warnings\nwarnings.simplefilter('error')",
    "a wake-up in every pipe": "import os, signal\nr, w = os.pipe(); os.set_blocking(w, False); signal.set_wakeup_fd(w)\nos.kill(os.getpid(), 28)",
    "memory that is never collected": "import gc\ngc.callbacks.append(lambda *_: 1 / 0)\ngc.collect()",
}
OUTPUTS = {
    "a pipe by name": "import os\nos.mkfifo('out')",
    "a link to a secret": "import os\nos.symlink('/etc/passwd', 'out')",
    "a link to itself": "import os\nos.symlink('out', 'out')",
    "a hundred gigabytes of nothing": "f = open('out', 'wb')\ntry: f.truncate(100 << 30)\nexcept OSError: pass",
    "a name of bytes": "open(b'out\\xff', 'w').close()",
    "a name of lines": "open('out\\n{\"exit_code\": 0}', 'w').close()",
    "a deep folder": "import os\nfor _ in range(60):\n    os.mkdir('o'); os.chdir('o')\nopen('out', 'w').close()",
    "a file that grows": "import os\nif os.fork() == 0:\n    os.setpgid(0, 0) if 0 else None\n    f = open('out', 'w')\n    while True: f.write('x' * 1000); f.flush()",
}
PATTERNS = ("out*", "**/**/**/**/**/**/**/out", "../../*", "/etc/*", "[" * 200, "o" * 5000)


@pytest.mark.parametrize("name", SESSIONS)
def test_a_session_tells_its_model_and_the_service_goes_on_after(name: str, box: Box) -> None:
    async def scenario() -> list[Any]:
        tool = PythonSessionTool(box.runner, CONFIG)
        async with asyncio.timeout(60):
            results = [
                await tool.execute({"code": code, "timeout_s": 2.0})
                for code in (SESSIONS[name], "print('on')", "print('on')")
            ]
            await tool.release()
        return results

    results = box.wait(scenario())
    assert all(isinstance(result.content, str) for result in results)
    assert len(results[0].content) <= 2 * LIMITS.max_output_bytes + 2000
    assert box.python("print('after')").stdout == "after\n"


def test_patterns_that_take_too_long_are_refused_by_name(box: Box) -> None:
    stars = "/".join(["**", "o"] * 20)
    told = box.wait(
        PythonTool(box.runner, CONFIG).execute({"code": OUTPUTS["a deep folder"], "outputs": [stars]})
    )
    assert json.loads(told.content)["refused_files"] == [stars]


@pytest.mark.parametrize("name", OUTPUTS)
def test_an_output_is_a_file_of_the_call_or_refused(name: str, box: Box) -> None:
    tool = PythonTool(box.runner, CONFIG)
    told = box.wait(tool.execute({"code": OUTPUTS[name], "outputs": list(PATTERNS), "timeout_s": 30.0}))
    assert "root:" not in told.content
    if name == "a deep folder":
        assert json.loads(told.content)["files"] == {f"{'o/' * 60}out": ""}
    assert len(told.content) <= 4 * LIMITS.disk_bytes
    assert box.python("print('after')").stdout == "after\n"
    assert box.leaves_no_folder()


Waits = Callable[[int], None]


def _interrupted(pid: int) -> None:
    os.kill(pid, signal.SIGINT)


def _alarmed(pid: int) -> None:
    """Send what a timer of the process would: one of its own could end before the call does."""
    os.kill(pid, signal.SIGALRM)


def _nothing(_: int) -> None:
    pass


# What comes between two calls: code of the first, what happens then, and what the second says besides.
BETWEEN: dict[str, tuple[str, Waits, str]] = {
    "an alarm of the call before": (
        "import signal\ndef late(*_): raise TimeoutError('too slow')\nsignal.signal(signal.SIGALRM, late)",
        _alarmed,
        "TimeoutError: too slow",
    ),
    "an interrupt that comes too late": ("", _interrupted, ""),
    "a pipe in the place of a file": ("import os\nos.mkfifo('in')", _nothing, "cannot write 'in'"),
    "no lines for a traceback": ("import linecache\nlinecache.cache = None", _nothing, "TypeError"),
    "no memory for the files": ("import resource\nresource.setrlimit(resource.RLIMIT_AS, (1 << 20,) * 2)", _nothing, "MemoryError"),
}  # fmt: skip


@pytest.mark.parametrize("name", BETWEEN)
def test_a_session_outlives(name: str, box: Box) -> None:
    code, happens, told = BETWEEN[name]

    async def scenario() -> list[Any]:
        tool = PythonSessionTool(box.runner, CONFIG)
        results = [await tool.execute({"code": f"{code}\nx = 5"})]
        happens(_process_of(tool))
        asked = {"code": "x", "files": {"in": "text"}, "outputs": ["in"]}
        results += [await tool.execute(asked), await tool.execute({"code": "x"})]
        await tool.release()
        return results

    first, second, third = box.wait(scenario())
    assert first.content == ""
    assert told in second.content
    assert "the session is over" not in second.content
    if "linecache" not in code:
        assert third.content == "5"


def test_a_session_whose_files_take_too_long_keeps_its_names(box: Box) -> None:
    deep = "x = 5\nimport os\nfor _ in range(40):\n    os.mkdir('o'); os.chdir('o')\nos.chdir('/'.join(['..'] * 40))"
    slow = {"code": "", "outputs": ["/".join(["**", "o"] * 20)], "timeout_s": 1.0}

    async def scenario() -> list[Any]:
        tool = PythonSessionTool(box.runner, CONFIG)
        results = [await tool.execute(asked) for asked in ({"code": deep}, slow, {"code": "x"})]
        await tool.release()
        return results

    _, cut, after = box.wait(scenario())
    found = json.loads(cut.content)
    assert found["refused_files"] == slow["outputs"]
    assert "interrupted because it took longer than 1 s" in found["notes"][-1]
    assert after.content == "5"


def _process_of(tool: PythonSessionTool) -> int:
    zygote = psutil.Process(tool._session._zygote._process.pid)  # type: ignore[union-attr]
    (found,) = zygote.children()
    return int(found.pid)
