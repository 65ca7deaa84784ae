"""The escape suite: what tool code may try, each tried for real.

It runs on the bare machine and, by `make test-sandbox-container`, in an unprivileged container.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.sandbox.attempts import ALL, Attempt
from tests.integration.sandbox.box import LIMITS, Box
from tests.integration.sandbox.conftest import SECRET, Outside

WORKING = [attempt for attempt in ALL if attempt.works]


@pytest.mark.parametrize("attempt", ALL, ids=lambda attempt: attempt.name.replace(" ", "-"))
def test_tool_code_does_not_escape_when_it(attempt: Attempt, box: Box, outside: Outside) -> None:
    (outside.folder / "mode").touch(mode=0o666)
    outcome = box.python(outside.fill(attempt.code))
    assert "ESCAPED" not in outcome.stdout, outcome
    assert SECRET not in outcome.stdout + outcome.stderr
    assert outcome.reason == "", "it must fail by itself, not by running out of something"
    assert outside.victim.poll() is None
    assert outside.secret.read_text() == SECRET


def test_the_suite_is_as_long_as_it_claims() -> None:
    assert len(ALL) >= 60
    assert len({attempt.name for attempt in ALL}) == len(ALL)


@pytest.mark.parametrize("attempt", WORKING, ids=lambda attempt: attempt.name.replace(" ", "-"))
def test_without_a_sandbox_the_attempt_succeeds(
    attempt: Attempt, outside: Outside, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TAILRACE_NATS_PASSWORD", SECRET)
    (outside.folder / "mode").touch(mode=0o666)
    (outside.folder / "mode").chmod(0o666)
    done = subprocess.run(
        [sys.executable, "-c", outside.fill(attempt.code)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        pass_fds=(outside.fd,),
    )
    for left in ("new", "d", "f"):
        path = outside.folder / left
        path.rmdir() if path.is_dir() else path.unlink(missing_ok=True)
    outside.secret.write_text(SECRET)
    assert "ESCAPED" in done.stdout, done.stderr


def test_a_fork_bomb_stays_within_its_limit_and_ends(box: Box) -> None:
    outcome = box.python("import os\nwhile True: os.fork()")
    assert outcome.reason in ("processes", "memory") or "BlockingIOError" in outcome.stderr
    assert box.python("print('still here')").stdout == "still here\n"


def test_a_bomb_of_threads_is_stopped(box: Box) -> None:
    one = "threading.Thread(target=time.sleep, args=(99,), daemon=True).start()"
    outcome = box.python(f"import threading, time\nwhile True: {one}")
    assert outcome.reason in ("processes", "memory") or "can't start new thread" in outcome.stderr
    assert not outcome.is_ok


def test_a_double_forked_survivor_dies_with_its_call(box: Box, outside: Outside) -> None:
    survivor = (
        "import os, time\n"
        "if os.fork() == 0:\n"
        "    os.setsid()\n"
        "    if os.fork() == 0:\n"
        "        for fd in range(3): os.close(fd)\n"
        "        time.sleep(30)\n"
        "    os._exit(0)\n"
        "os.wait()\n"
    )
    assert box.python(survivor).is_ok
    # The next call on the same process begins only when all of the last one is dead.
    mine = "import os\nprint(os.getppid())"
    zygote = int(box.python(mine).stdout)
    children = Path(f"/proc/{zygote}/task/{zygote}/children")
    assert children.read_text().split() == []


def test_a_survivor_that_keeps_the_output_open_does_not_hold_the_call(box: Box) -> None:
    outcome = box.shell("(sleep 30; echo late) & echo early")
    assert outcome.stdout == "early\n"
    assert outcome.is_ok


def test_a_memory_bomb_of_one_process_fails_by_itself(box: Box) -> None:
    outcome = box.python("x = bytearray(400 << 20)")
    assert "MemoryError" in outcome.stderr


def test_a_memory_bomb_of_many_processes_is_ended(box: Box) -> None:
    share = LIMITS.memory_bytes // 3
    bomb = (
        "import os, time\n"
        f"pids = [os.fork() for _ in range(3)]\nx = bytearray({share})\n"
        "for i in range(0, len(x), 4096): x[i] = 1\ntime.sleep(9)"
    )
    assert box.python(bomb).reason == "memory"


def test_a_large_file_cannot_be_written(box: Box) -> None:
    outcome = box.python(f"f = open('f', 'wb')\nfor _ in range(64): f.write(bytes({1 << 20}))")
    assert not outcome.is_ok
    assert outcome.reason == "disk" or outcome.exit_code != 0


def test_many_small_writes_fill_no_disk(box: Box) -> None:
    bomb = (
        "import time\nfor n in range(40):\n    open(f'f{n}', 'wb').write(bytes(1 << 20))\n"
        "    time.sleep(0.005)\ntime.sleep(9)"
    )
    assert box.python(bomb).reason == "disk"


def test_deleted_files_that_stay_open_count_too(box: Box) -> None:
    bomb = (
        "import os, time\nkept = []\nfor n in range(20):\n    kept.append(open('f', 'wb', 0))\n"
        "    os.unlink('f')\n    kept[-1].write(bytes(1 << 20))\n    time.sleep(0.005)\ntime.sleep(9)"
    )
    assert box.python(bomb).reason == "disk"


def test_deleted_files_that_stay_mapped_count_too(box: Box) -> None:
    bomb = (
        "import mmap, os, time\nkept = []\nfor n in range(20):\n    f = open('f', 'w+b', 0)\n"
        "    f.write(bytes(1 << 20))\n    kept.append(mmap.mmap(f.fileno(), 1 << 20))\n"
        "    f.close()\n    os.unlink('f')\n    time.sleep(0.005)\ntime.sleep(9)"
    )
    assert box.python(bomb).reason == "disk"


def test_a_bomb_of_files_is_ended(box: Box) -> None:
    bomb = "import time\nfor n in range(500): open(f'f{n}', 'w').close()\ntime.sleep(9)"
    assert box.python(bomb).reason == "files"


def test_folders_too_deep_to_look_into_end_the_call_and_are_removed(box: Box) -> None:
    bomb = "import os, time\nfor n in range(1200): os.mkdir('d'); os.chdir('d')\ntime.sleep(9)"
    assert box.python(bomb).reason in ("files", "uninspectable")
    assert box.python("print(1)").is_ok
    assert box.leaves_no_folder()


def test_a_flood_of_output_is_cut_and_ended(box: Box) -> None:
    outcome = box.python("while True: print('x' * 1000)")
    assert outcome.reason == "output"
    assert outcome.is_cut
    assert len(outcome.stdout) <= LIMITS.max_output_bytes


def test_a_program_that_does_not_end_is_ended_with_its_output_kept(box: Box) -> None:
    outcome = box.python("print('begun')\nwhile True: pass", wall_s=3)
    assert outcome.reason == "wall_clock"
    assert outcome.stdout == "begun\n"


def test_ignoring_signals_does_not_help(box: Box) -> None:
    code = (
        "import signal\nfor n in range(1, 65):\n    try: signal.signal(n, signal.SIG_IGN)\n"
        "    except (OSError, ValueError): pass\nwhile True: pass"
    )
    assert box.python(code, wall_s=1).reason == "wall_clock"


def test_nothing_of_a_call_is_there_for_the_next(box: Box) -> None:
    first = box.python(
        "import os, sys, builtins, json\nopen('left', 'w').write('x')\nbuiltins.left = 1\n"
        "json.left = 1\nos.environ['LEFT'] = '1'\nprint(os.getcwd())"
    )
    second = box.python(
        "import os, builtins, json\nprint(os.listdir('.'), hasattr(builtins, 'left'), "
        f"hasattr(json, 'left'), 'LEFT' in os.environ, os.path.exists({first.stdout.strip()!r}))"
    )
    assert second.stdout == "[] False False False False\n"


def test_the_memory_of_a_call_shows_no_other_call(box: Box) -> None:
    marker = "residue-of-an-earlier-call"
    assert box.python(f"print({marker!r})", files={"f": b"residue"}).is_ok
    search = (
        "import gc\n"
        "wanted = ''.join(['residue-of-an-', 'earlier-call'])\n"
        "held = [o for o in gc.get_objects() if isinstance(o, (list, tuple)) and o is not globals()]\n"
        "print(sum(type(v) is str and v == wanted for o in held for v in o))"
    )
    assert box.python(search).stdout == "0\n"


def test_random_numbers_differ_from_call_to_call(box: Box) -> None:
    code = "import random; print(random.random())"
    assert box.python(code).stdout != box.python(code).stdout


def test_modes_that_keep_everybody_out_do_not_stop_the_removal(box: Box) -> None:
    code = "import os\nos.mkdir('d'); os.mkdir('d/e'); open('d/e/f', 'w').close()\nos.chmod('d', 0)"
    assert box.python(code).reason in ("", "uninspectable")  # if it does not end before three looks
    assert box.python("import os; print(os.listdir('.'))").stdout == "[]\n"
    assert box.leaves_no_folder()
