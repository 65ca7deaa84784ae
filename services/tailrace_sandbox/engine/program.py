"""Running Python source that came as text: one program, or one piece of a session.

Also runs on the Python of a container's image, from 3.7 on.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]
import _thread
import ast
import atexit
import builtins
import contextlib
import linecache
import os
import sys
import threading
import traceback
import types
from types import TracebackType
from typing import Any

FILE_NAME = "main.py"
# Tool code may replace the functions of `signal`.
_set_mask, _take = _signal.pthread_sigmask, _signal.sigtimedwait
_BLOCK, _SET, _INTERRUPT = _signal.SIG_BLOCK, _signal.SIG_SETMASK, {_signal.SIGINT}
_ALL = set(range(1, _signal.NSIG)) - {32, 33}  # but for those that threads use


class Attempt:
    """Context manager around tool code: whatever it raises is shown and becomes an exit code."""

    def __init__(self) -> None:
        self.exit_code = 0
        self.left = False  # it asked to exit

    def __enter__(self) -> Attempt:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if isinstance(error, SystemExit):
            self.left = True
            self.exit_code = _exit_code(error)
        elif error is not None:
            self.exit_code = 1
            own_frame = trace.tb_next if trace is not None else None
            with _Untold(error):
                traceback.print_exception(kind, error, own_frame)
        return True


class _Untold:
    """Context manager around the report of an error: names the error if even that fails."""

    def __init__(self, error: BaseException) -> None:
        self._error = error

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> bool:
        if kind is not None:
            name, reason = type(self._error).__name__, kind.__name__
            _complain(f"{name}, which cannot be shown because of {reason}\n")
        return True


def _complain(text: str) -> None:
    """Write to the standard error of the process, whatever tool code made of `sys.stderr`."""
    with contextlib.suppress(OSError):
        os.write(2, text.encode(errors="replace"))


def _exit_code(error: SystemExit) -> int:
    if error.code is None:
        return 0
    if isinstance(error.code, int):
        return error.code & 0xFF
    with contextlib.suppress(OSError, ValueError):
        sys.stderr.write(f"{error.code}\n")
    return 1


def fresh_main() -> dict[str, Any]:
    """The names of a new `__main__`, which modules and pickles find under that name."""
    main = types.ModuleType("__main__")
    main.__dict__.update({"__builtins__": builtins, "__file__": FILE_NAME})
    sys.modules["__main__"] = main
    return main.__dict__


def run(code: str, names: dict[str, Any]) -> Attempt:
    """Run a whole program."""
    attempt = Attempt()
    with attempt:
        _remember(code, FILE_NAME)
        exec(compile(code, FILE_NAME, "exec"), names)
    return attempt


def run_cell(code: str, names: dict[str, Any], file_name: str) -> Attempt:
    """Run a piece of a session; the value of an expression at its end is shown."""
    attempt = Attempt()
    with attempt:
        _remember(code, file_name)
        tree = ast.parse(code, file_name)
        last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
        exec(compile(tree, file_name, "exec"), names)
        if isinstance(last, ast.Expr):
            sys.displayhook(eval(compile(ast.Expression(last.value), file_name, "eval"), names))
    return attempt


def _remember(code: str, file_name: str) -> None:
    """Let tracebacks quote the source."""
    linecache.cache[file_name] = (len(code), None, code.splitlines(keepends=True), file_name)


def hold_signals() -> set[int]:
    """Let signals wait; returns the mask that tool code had, for `act_on_signals`.

    Between two pieces of a session no handler of tool code may run: it could raise an error there.
    """
    found: set[int] = _set_mask(_BLOCK, _ALL)
    return found


def act_on_signals(mask: set[int]) -> Attempt:
    """Let tool code have the signals that waited, but for an interrupt of what is over."""
    attempt = Attempt()
    with attempt:
        if _signal.SIGINT not in mask:
            _take(_INTERRUPT, 0)
        _set_mask(_SET, mask)
    return attempt


def flush() -> None:
    """Write out what is buffered."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()


def leave(exit_code: int) -> None:
    """End the process as the interpreter would, without the time that taking it apart would take."""
    attempt = Attempt()
    with attempt:
        if _thread._count():  # beside this one
            threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
    flush()
    os._exit(exit_code or attempt.exit_code)
