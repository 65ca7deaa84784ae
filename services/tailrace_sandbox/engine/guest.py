"""Program inside of a container: runs one program, or keeps a session and passes calls to it.

Invariants: it needs Python 3.7 and nothing else of this project but `program`, since it travels as
text into images of others. A session is a process that listens on a socket in the container; each call
is a process that hands it code and its own output, so that this reaches the service directly. Nothing
that it says is believed by the service, which has a deadline of its own.
"""

from __future__ import annotations

import array
import os
import signal
import socket
import struct
import sys
import time
from typing import Any, NoReturn

from tailrace_sandbox.engine import program

SOCKET = "/tmp/.tailrace-session"
STATUS = "/tmp/.tailrace-status"
LOOK_INTO_STATUS = 250  # exit code of a call after which `STATUS` has the exit code and two flags
INTERRUPT_GRACE_S = 1.0
_END = STATUS + ".end"
_END_TIMEOUT_S = 5.0
_POLL_S = 0.01
_WORD = struct.Struct("<I")


def run_program(size: float) -> None:
    """Run the program in the first `size` bytes of standard input; the rest is the program's own."""
    code = _exactly(0, int(size)).decode()
    _prepare()
    program.leave(program.run(code, program.fresh_main()).exit_code)


def call_session(wall_s: float) -> None:
    """Run standard input as the next piece of the session, and begin one if there was none."""
    code = _exactly(0, -1)
    if os.path.exists(_END):  # since the last piece
        _leave(_exit_code_of_session(), was_interrupted=False, ended=True)
    channel = _connect()
    pid = _greeted(channel)
    if pid is None:
        _leave(_exit_code_of_session(), was_interrupted=False, ended=True)
    ends = array.array("i", [1, 2])
    channel.sendmsg([_WORD.pack(len(code))], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, ends)])
    channel.sendall(code)
    answer = _answer(channel, wall_s)
    was_interrupted = answer is None
    if answer is None:
        os.kill(pid, signal.SIGINT)
        answer = _answer(channel, INTERRUPT_GRACE_S)
    if answer is None:
        os.kill(pid, signal.SIGKILL)
    exit_code = _WORD.unpack(answer)[0] if answer else _exit_code_of_session()
    if answer and not was_interrupted:
        os._exit(1 if exit_code else 0)
    _leave(exit_code, was_interrupted=was_interrupted, ended=not answer)


def _leave(exit_code: int, *, was_interrupted: bool, ended: bool) -> NoReturn:
    """Write down how the session's piece ended, and end."""
    with open(STATUS, "w") as status:
        status.write(f"{exit_code} {was_interrupted:d} {ended:d}")
    os._exit(LOOK_INTO_STATUS)


def _greeted(channel: socket.socket) -> int | None:
    """Process of the session; None if it ended."""
    try:
        greeting = channel.recv(_WORD.size)
    except OSError:
        return None
    return int(_WORD.unpack(greeting)[0]) if len(greeting) == _WORD.size else None


def _answer(channel: socket.socket, timeout_s: float) -> bytes | None:
    """Answer of the session: empty if it ended, None if it takes longer."""
    channel.settimeout(timeout_s)
    try:
        return channel.recv(_WORD.size)
    except socket.timeout:  # noqa: UP041 - another class before Python 3.10
        return None
    except OSError:
        return b""


def _exit_code_of_session() -> int:
    """Exit code of a session that ended or was killed, as its guard writes it down."""
    give_up_s = time.monotonic() + _END_TIMEOUT_S
    while not os.path.exists(_END) and time.monotonic() < give_up_s:
        time.sleep(_POLL_S)
    try:
        with open(_END) as file:
            return int(file.read())
    except (OSError, ValueError):
        return -signal.SIGKILL


def _connect() -> socket.socket:
    channel = socket.socket(socket.AF_UNIX)
    try:
        channel.connect(SOCKET)
    except OSError:
        _begin()
        channel.connect(SOCKET)
    return channel


def _begin() -> None:
    """Start the session below a guard that writes its exit code down; it listens at the return."""
    for path in (SOCKET, _END):
        if os.path.exists(path):
            os.unlink(path)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(SOCKET)
    listener.listen(1)
    if os.fork():
        listener.close()
        return
    os.setsid()
    _be_silent()
    session = os.fork()
    if session == 0:
        _serve(listener)
    listener.close()
    status = os.waitpid(session, 0)[1]
    with open(_END + ".new", "w") as file:
        file.write(str(-os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)))
    os.rename(_END + ".new", _END)
    os._exit(0)


def _be_silent() -> None:
    null = os.open(os.devnull, os.O_RDWR)
    for fd in range(3):
        os.dup2(null, fd)
    os.close(null)


def _serve(listener: socket.socket) -> None:
    _prepare()
    names, number = program.fresh_main(), 0
    mask = program.hold_signals()
    while True:
        channel, _ = listener.accept()
        number += 1
        channel.sendall(_WORD.pack(os.getpid()))
        header, ancillary, _, _ = channel.recvmsg(_WORD.size, socket.CMSG_SPACE(8))
        ends = array.array("i")
        ends.frombytes(ancillary[0][2])
        code = _exactly(channel.fileno(), _WORD.unpack(header)[0]).decode()
        for target, fd in enumerate(ends, 1):
            os.dup2(fd, target)
            os.close(fd)
        attempt = _attempted(code, names, f"cell{number}.py", mask)
        mask = program.hold_signals()
        program.flush()
        if attempt.left:
            program.leave(attempt.exit_code)
        _be_silent()
        channel.sendall(_WORD.pack(attempt.exit_code))
        channel.close()


def _attempted(code: str, names: dict[str, Any], file_name: str, mask: set[int]) -> program.Attempt:
    """Run the next piece; whatever a handler of tool code raises, and whenever, is shown."""
    around = program.Attempt()
    with around:
        waited = program.act_on_signals(mask)
        return waited if waited.left else program.run_cell(code, names, file_name)
    return around


def _prepare() -> None:
    """Make the interpreter look as if it had been started with the program."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.argv = [program.FILE_NAME]
    sys.path[0] = os.getcwd()
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]


def _exactly(fd: int, count: int) -> bytes:
    """Bytes from `fd`: `count`, or fewer at its end; all of them if `count` is negative."""
    data = bytearray()
    while len(data) != count:
        piece = os.read(fd, 65536 if count < 0 else min(65536, count - len(data)))
        if not piece:
            break
        data += piece
    return bytes(data)
