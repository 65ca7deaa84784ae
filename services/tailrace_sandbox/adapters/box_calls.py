"""One call in a box: files in, the program with its limits, files out."""

import asyncio
import time
from dataclasses import replace
from pathlib import Path

from tailrace_sandbox.adapters import box_files
from tailrace_sandbox.adapters.box import Box, BoxAnswer, BoxCommand
from tailrace_sandbox.config import CallLimits
from tailrace_sandbox.engine import guest, program
from tailrace_sandbox.ports import Execution, Work

_FILES_S = 60.0
_GRACE_S = 5.0  # for the answer of a session, beyond its own deadlines
_FIRST_SIGNAL = 128
_LAST_SIGNAL = 192
_TIMED_OUT = (124, 137)  # as `timeout` says it; the second had to be killed
_NO_PROGRAM = 127
_NO_PYTHON = "there is no python3 in this image, which python and python_session need\n"
_WITHIN_TIME = (
    'command -v timeout >/dev/null && exec timeout -k 1 $1 /bin/sh -c "$2"; exec /bin/sh -c "$2"'
)
_START = """
import sys, types
def module(name, text=None):
    made = sys.modules[name] = types.ModuleType(name)
    made.__path__ = []
    if text is not None: exec(compile(text, name, "exec"), made.__dict__)
    return made
_, program, guest, function, argument = sys.argv
module("tailrace_sandbox")
engine = module("tailrace_sandbox.engine")
engine.program = module("tailrace_sandbox.engine.program", program)
getattr(module("tailrace_sandbox.engine.guest", guest), function)(float(argument))
"""


async def called(box: Box, work: Work, limits: CallLimits) -> Execution:
    """One call in a box: files in, the program, files out."""
    wall_s = min(work.wall_s, limits.max_wall_s)
    if work.files and (refused := await _put_files(box, work)):
        return refused
    began_s = time.perf_counter()
    answer = await box.execute(_COMMANDS[work.mode](work, wall_s, limits.max_output_bytes))
    took_s = time.perf_counter() - began_s
    outcome = _outcome(answer, work)
    if answer.exit_code in _TIMED_OUT and work.mode == "kept_shell" and took_s >= wall_s:
        outcome = replace(outcome, reason="stopped")
    elif _is_in_status(answer, work):
        outcome = await _status(box, outcome)
    if work.outputs and not answer.reason:
        found = await box_files.collected(box, work.outputs, limits.max_transfer_bytes)
        outcome = replace(outcome, files=found.files, refused=found.refused)
    return outcome


async def _put_files(box: Box, work: Work) -> Execution | None:
    """Write the call's files; the outcome of the call if that is not possible."""
    packed = await asyncio.to_thread(box_files.packed, work.files)
    put = await box.execute(BoxCommand(box_files.UNPACK, _FILES_S, packed))
    if not put.exit_code and not put.reason:
        return None
    reason = put.stderr.decode(errors="replace").strip()
    return Execution(1, stderr=f"files: cannot write them: {reason}\n", reason=put.reason)


def _outcome(answer: BoxAnswer, work: Work) -> Execution:
    exit_code, stderr = answer.exit_code, answer.stderr.decode(errors="replace")
    if _FIRST_SIGNAL < exit_code <= _LAST_SIGNAL and work.mode == "python":
        exit_code = _FIRST_SIGNAL - exit_code
    if exit_code == _NO_PROGRAM and _lacks_python(answer, work):
        stderr = _NO_PYTHON
    return Execution(
        exit_code, answer.stdout.decode(errors="replace"), stderr, answer.reason, answer.is_cut
    )


def _lacks_python(answer: BoxAnswer, work: Work) -> bool:
    """Says whether the runtime found no interpreter; programs and commands may exit with 127, too."""
    return work.mode in ("python", "session") and b"python3" in answer.stdout + answer.stderr


def _is_in_status(answer: BoxAnswer, work: Work) -> bool:
    """Says whether a session wrote how its piece ended into the box."""
    return work.mode == "session" and not answer.reason and answer.exit_code == guest.LOOK_INTO_STATUS


async def _status(box: Box, outcome: Execution) -> Execution:
    """Outcome of a piece of a session that was interrupted or ended it. The box may say anything."""
    answer = await box.execute(BoxCommand(("head", "-c", "64", guest.STATUS), _FILES_S))
    try:
        exit_code, was_interrupted, ended = map(int, answer.stdout.split())
    except ValueError:
        exit_code, was_interrupted, ended = outcome.exit_code, 0, 0
    reason = ("wall_clock" if ended else "interrupted") if was_interrupted else ""
    return replace(
        outcome, exit_code=max(-64, min(exit_code, 255)), reason=reason, ended_session=bool(ended)
    )


def _python(work: Work, wall_s: float, max_output_bytes: int) -> BoxCommand:
    code = work.code.encode()
    return BoxCommand(
        _guest("run_program", len(code)), wall_s, code + work.stdin.encode(), max_output_bytes
    )


def _shell(work: Work, wall_s: float, max_output_bytes: int) -> BoxCommand:
    return BoxCommand(("/bin/sh", "-c", work.code), wall_s, work.stdin.encode(), max_output_bytes)


def _kept_shell(work: Work, wall_s: float, max_output_bytes: int) -> BoxCommand:
    argv = ("/bin/sh", "-c", _WITHIN_TIME, "sh", f"{wall_s:g}", work.code)
    return BoxCommand(argv, wall_s + _GRACE_S, work.stdin.encode(), max_output_bytes)


def _session(work: Work, wall_s: float, max_output_bytes: int) -> BoxCommand:
    given_s = wall_s + guest.INTERRUPT_GRACE_S + _GRACE_S
    return BoxCommand(_guest("call_session", wall_s), given_s, work.code.encode(), max_output_bytes)


def _guest(function: str, argument: float) -> tuple[str, ...]:
    """Command line of the program for the inside, with its text."""
    return ("python3", "-X", "utf8", "-c", _START, _PROGRAM_TEXT, _GUEST_TEXT, function, str(argument))


_PROGRAM_TEXT, _GUEST_TEXT = (
    Path(str(module.__file__)).read_text(encoding="utf-8") for module in (program, guest)
)
_COMMANDS = {"python": _python, "shell": _shell, "kept_shell": _kept_shell, "session": _session}
