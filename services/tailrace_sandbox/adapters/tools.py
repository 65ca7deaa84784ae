"""The tools that models call: `python`, `shell` and `python_session`."""

import asyncio
import base64
import binascii
import contextlib
import signal
from collections.abc import Callable
from pathlib import PurePosixPath
from typing import Any, ClassVar

import msgspec

from tailrace.log import get_logger
from tailrace.sdk.tool import Tool, ToolOffer, ToolOutput, ToolSession, ToolUnavailableError
from tailrace_sandbox import metrics
from tailrace_sandbox.config import CallLimits, SandboxConfig
from tailrace_sandbox.core.limits import MAX_WATCHED
from tailrace_sandbox.ports import Execution, Sandbox, SandboxLostError, SandboxSession, Work

log = get_logger(__name__)

_MAX_COMMAND_BYTES = (1 << 17) - 1  # of Linux, for one argument of a program
_EXTRA_S = 30.0  # the wait for a free process, beyond the time of a call
_ONE_FILE = {
    "type": ["string", "object"],
    "properties": {"base64": {"type": "string"}},
    "required": ["base64"],
    "additionalProperties": False,
}
_FILES = {
    "type": "object",
    "additionalProperties": _ONE_FILE,
    "description": 'Files to put into the working folder first, by path: text, or {"base64": "..."}.',
}
_OUTPUTS = {
    "type": "array",
    "items": {"type": "string"},
    "description": (
        "Paths or patterns of files to return. The result is then a JSON object with the files by "
        'path: text, or {"base64": "..."}.'
    ),
}
_TIMEOUT = {"type": "number", "exclusiveMinimum": 0, "description": "Seconds that the call may take."}
_REASONS = {
    "wall_clock": "it took longer than {wall_s:g} s",
    "memory": "it used more than {memory_bytes} bytes of memory",
    "processes": "it had more than {max_processes} processes",
    "disk": "it wrote more than {disk_bytes} bytes",
    "files": "it made more than {max_files} files",
    "output": "it did not stop writing output",
    "mappings": "it had more than {max_mappings} memory mappings",
    "watches": f"its epolls watched more than {MAX_WATCHED} descriptors",
    "uninspectable": "it hid its files or processes",
    "restless": "something in it went on running between two calls",
    "lost": "its process was lost twice: it may need too much of the machine",
}
_ENDED_ALONE = {  # without its session
    "interrupted": "interrupted because it took longer than {wall_s:g} s; variables are kept",
    "stopped": "ended because it took longer than {wall_s:g} s; files are kept",
}
_SESSION_LOST = "the session was lost with its variables and files; the next call starts a new one"
_SESSION_ENDED = "the session is over; the next call starts a new one, without its variables and files"
_NO_NETWORK = (
    "Network is unreachable", "name resolution", "Name or service not known",
    "Could not resolve host", "Could not resolve hostname",
)  # fmt: skip
_STDIN = {"stdin": {"type": "string", "description": "Standard input."}}


def _parameters(name: str, description: str, **more: Any) -> dict[str, Any]:
    properties = {
        name: {"type": "string", "description": description},
        **more,
        "files": _FILES,
        "outputs": _OUTPUTS,
        "timeout_s": _TIMEOUT,
    }
    return {
        "type": "object",
        "properties": properties,
        "required": [name],
        "additionalProperties": False,
    }


class PythonTool(Tool):
    """One program per call."""

    name = "python"
    description = (
        "Run a Python program and return what it prints. Nothing is kept from call to call, and there "
        "is no network. Print the results that you want to see."
    )
    parameters: ClassVar[dict[str, Any]] = _parameters("code", "Source code of the program.", **_STDIN)
    is_idempotent = True
    is_stateful = False
    mode: ClassVar[str] = "python"
    argument: ClassVar[str] = "code"

    def __init__(self, sandbox: Sandbox, config: SandboxConfig) -> None:
        self._sandbox = sandbox
        self._config = config

    async def execute(self, arguments: dict[str, Any]) -> ToolOutput:
        """See `Tool`."""
        limits = self._config.limits_of(self.name)
        work = _work(self.mode, arguments[self.argument], arguments, limits)
        try:
            outcome = await self._sandbox.run(work)
        except SandboxLostError as error:
            metrics.CALLS.labels(self.name, "lost").inc()
            raise ToolUnavailableError(str(error)) from error
        return _result(self.name, work, outcome, limits)


class ShellTool(PythonTool):
    """One command line per call."""

    name = "shell"
    description = (
        "Run a command line in a shell and return what it prints. The working folder is empty and "
        "nothing is kept from call to call. There is no network."
    )
    parameters: ClassVar[dict[str, Any]] = _parameters("command", "The command line.", **_STDIN)
    mode: ClassVar[str] = "shell"
    argument: ClassVar[str] = "command"


class PythonSessionTool(Tool):
    """One Python per episode, which keeps its names and files from call to call."""

    name = "python_session"
    description = (
        "Run Python code in a session that keeps variables and files between calls, like a notebook; "
        "the value of an expression at the end is shown. There is no network."
    )
    parameters: ClassVar[dict[str, Any]] = _parameters("code", "Code to run next.")
    mode: ClassVar[str] = "session"
    argument: ClassVar[str] = "code"

    def __init__(self, sandbox: Sandbox, config: SandboxConfig) -> None:
        self._sandbox = sandbox
        self._config = config
        self._image = ""
        self._session: SandboxSession | None = None

    async def create(self, session: ToolSession) -> None:
        """See `Tool`. The task's row may ask for an image of its own."""
        image = session.create_kwargs.get("image", "")
        if not isinstance(image, str):
            raise ValueError(f"{self.name}: image in tools_kwargs must be a name, not {image!r}")
        self._image = image
        self._session = await self._opened()

    async def _opened(self) -> SandboxSession:
        return await self._sandbox.open_session(self.mode, self._image)

    async def execute(self, arguments: dict[str, Any]) -> ToolOutput:
        """See `Tool`. A session that is lost is no failure of the episode: the model is told."""
        limits = self._config.limits_of(self.name)
        work = _work(self.mode, arguments[self.argument], arguments, limits)
        try:
            if self._session is None:
                self._session = await self._opened()
        except SandboxLostError as error:
            metrics.CALLS.labels(self.name, "lost").inc()
            raise ToolUnavailableError(str(error)) from error
        try:
            outcome = await self._session.execute(work)
        except SandboxLostError as error:
            log.warning("a session was lost", reason=str(error))
            metrics.CALLS.labels(self.name, "lost").inc()
            await self.release()
            return ToolOutput(f"[{_SESSION_LOST}]", is_error=True)
        return _result(self.name, work, outcome, limits)

    async def release(self) -> None:
        """See `Tool`."""
        session, self._session = self._session, None
        if session is not None:
            await session.close()


class KeptShellTool(PythonSessionTool):
    """Command lines in one container per episode."""

    name = "shell"
    description = (
        "Run a command line in a shell and return what it prints. Files stay from call to call; the "
        "working folder, variables and processes of a command do not. There is no network."
    )
    parameters: ClassVar[dict[str, Any]] = _parameters("command", "The command line.", **_STDIN)
    mode: ClassVar[str] = "kept_shell"
    argument: ClassVar[str] = "command"


def offers(sandbox: Sandbox, config: SandboxConfig) -> tuple[ToolOffer, ...]:
    """All three tools, with timeouts above their own limits.

    Calls of `python` and `shell` beyond `max_concurrency` wait before their time begins.
    """
    python, shell = PythonTool(sandbox, config), ShellTool(sandbox, config)
    made: tuple[tuple[type[Tool], Callable[[], Tool]], ...] = (
        (PythonTool, lambda: python),
        (KeptShellTool, lambda: KeptShellTool(sandbox, config))
        if config.keep_shell
        else (ShellTool, lambda: shell),
        (PythonSessionTool, lambda: PythonSessionTool(sandbox, config)),
    )
    room = asyncio.Semaphore(config.max_concurrency)
    return tuple(
        ToolOffer.of(
            kind,
            make,
            room=None if kind.is_stateful else room,
            timeout_s=config.limits_of(kind.name).max_wall_s + _EXTRA_S,
        )
        for kind, make in made
    )


def _work(mode: str, code: str, arguments: dict[str, Any], limits: CallLimits) -> Work:
    if "shell" in mode and "\0" in code:
        raise ValueError("command: it holds a null character, which no command line can")
    if "shell" in mode and len(code.encode(errors="replace")) > _MAX_COMMAND_BYTES:
        raise ValueError(
            f"command: it is longer than {_MAX_COMMAND_BYTES} bytes, which no command line can be: put "
            "long texts into files, with the argument files, or use python"
        )
    outputs = tuple(arguments.get("outputs", ()))
    for key, names in (("files", arguments.get("files", {})), ("outputs", outputs)):
        if any("\0" in name for name in names):
            raise ValueError(f"{key}: a path holds a null character, which no file can")
    files = {name: _bytes_of(name, content) for name, content in arguments.get("files", {}).items()}
    if sum(map(len, files.values())) > limits.max_transfer_bytes:
        raise ValueError(f"files: more than {limits.max_transfer_bytes} bytes")
    return Work(
        mode,
        code,
        min(arguments.get("timeout_s", limits.wall_s), limits.max_wall_s),
        arguments.get("stdin", ""),
        files,
        outputs,
    )


def _result(tool: str, work: Work, outcome: Execution, limits: CallLimits) -> ToolOutput:
    shown: dict[str, float] = {
        "wall_s": work.wall_s,
        "memory_bytes": limits.memory_bytes,
        "max_processes": limits.max_processes,
        "disk_bytes": limits.disk_bytes,
        "max_files": limits.max_files,
        "max_mappings": limits.max_mappings,
    }
    result = outcome.reason or ("ok" if outcome.is_ok else "failed")
    metrics.CALLS.labels(tool, result).inc()
    notes = _notes(outcome, shown)
    content = _json_of(outcome, notes) if work.outputs else _text_of(outcome, notes)
    return ToolOutput(content, is_error=not outcome.is_ok)


def _notes(outcome: Execution, limits: dict[str, float]) -> list[str]:
    """One line for each thing that a model should know."""
    notes = []
    if outcome.is_cut:
        notes.append("output was cut")
    if outcome.reason in _ENDED_ALONE:
        notes.append(_ENDED_ALONE[outcome.reason].format(**limits))
    elif outcome.reason:
        notes.append(f"ended because {_why(outcome.reason, limits)}")
    elif outcome.exit_code < 0:
        notes.append(f"ended by {_signal(-outcome.exit_code)}")
    elif outcome.exit_code:
        notes.append(f"exit code {outcome.exit_code}")
    if outcome.ended_session:
        notes.append(_SESSION_ENDED)
    if outcome.exit_code and any(words in outcome.stderr for words in _NO_NETWORK):
        notes.append("the sandbox has no network")
    return notes


def _why(reason: str, limits: dict[str, float]) -> str:
    """Text of a reason; one of a user's own backend is its text."""
    known = _REASONS.get(reason)
    return reason if known is None else known.format(**limits)


def _signal(number: int) -> str:
    """Name of a signal; those without a name of their own count from SIGRTMIN."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"SIGRTMIN+{number - signal.SIGRTMIN}"


def _text_of(outcome: Execution, notes: list[str]) -> str:
    """For a model: output, errors, and the notes in brackets."""
    parts = (outcome.stdout.rstrip("\n"), outcome.stderr.rstrip("\n"), *(f"[{note}]" for note in notes))
    return "\n".join(part for part in parts if part)


def _json_of(outcome: Execution, notes: list[str]) -> str:
    """Everything, for callers that asked for files."""
    content = {
        "exit_code": outcome.exit_code,
        "stdout": outcome.stdout,
        "stderr": outcome.stderr,
        "reason": outcome.reason,
        "notes": notes,
        "output_was_cut": outcome.is_cut,
        "files": {name: _shown(content) for name, content in outcome.files.items()},
        "refused_files": outcome.refused,
    }
    return msgspec.json.encode(content).decode()


def _bytes_of(name: str, content: str | dict[str, str]) -> bytes:
    """Content of a file given as text or in base64; raises `ValueError` with the file's name."""
    path = PurePosixPath(name)
    if not path.name or path.is_absolute() or ".." in path.parts or "\0" in name:
        raise ValueError(f"files: {name!r} is not a path below the working folder")
    try:
        if isinstance(content, str):
            return content.encode()
        return base64.b64decode(content["base64"], validate=True)
    except UnicodeEncodeError as error:
        raise ValueError(f"files: the text of {name!r} is not Unicode: {error.reason}") from error
    except (binascii.Error, ValueError) as error:
        raise ValueError(f"files: the content of {name!r} is not valid base64: {error}") from error


def _shown(content: bytes) -> str | dict[str, str]:
    """Text if it is some, otherwise base64. No text has null characters, each six bytes of JSON."""
    if b"\0" not in content:
        with contextlib.suppress(UnicodeDecodeError):
            return content.decode()
    return {"base64": base64.b64encode(content).decode()}
