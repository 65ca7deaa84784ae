"""The tools that models call: `python`, `shell` and `python_session`."""

import json
import signal
from typing import Any, ClassVar

from tailrace.sdk.tool import Tool, ToolOffer, ToolOutput, ToolSession, ToolUnavailableError
from tailrace_sandbox import metrics
from tailrace_sandbox.config import SandboxConfig
from tailrace_sandbox.ports import Execution, Sandbox, SandboxLostError, SandboxSession, Work

_EXTRA_S = 30.0  # the wait for a free process, beyond the time of a call
_FILES = {
    "type": "object",
    "additionalProperties": {"type": "string"},
    "description": "Files to put into the working folder first: content in base64, by path.",
}
_OUTPUTS = {
    "type": "array",
    "items": {"type": "string"},
    "description": "Paths or patterns of files to return. The result is then a JSON object.",
}
_TIMEOUT = {"type": "number", "exclusiveMinimum": 0, "description": "Seconds that the call may take."}
_REASONS = {
    "wall_clock": "it took longer than {wall_s:g} s",
    "interrupted": "it took longer than {wall_s:g} s; variables are kept",
    "memory": "it used more than {memory_bytes} bytes of memory",
    "processes": "it had more than {max_processes} processes",
    "disk": "it wrote more than {disk_bytes} bytes",
    "files": "it made more than {max_files} files",
    "output": "it did not stop writing output",
    "uninspectable": "it hid its files or processes",
}
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
        work = _work(self.mode, arguments[self.argument], arguments, self._config)
        try:
            outcome = await self._sandbox.run(work)
        except SandboxLostError as error:
            metrics.CALLS.labels(self.name, "lost").inc()
            raise ToolUnavailableError(str(error)) from error
        return _result(self.name, work, outcome, self._config)


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

    def __init__(self, sandbox: Sandbox, config: SandboxConfig) -> None:
        self._sandbox = sandbox
        self._config = config
        self._session: SandboxSession | None = None

    async def create(self, session: ToolSession) -> None:
        """See `Tool`."""
        self._session = await self._sandbox.open_session()

    async def execute(self, arguments: dict[str, Any]) -> ToolOutput:
        """See `Tool`."""
        assert self._session is not None
        work = _work("session", arguments["code"], arguments, self._config)
        try:
            outcome = await self._session.execute(work)
        except SandboxLostError as error:
            metrics.CALLS.labels(self.name, "lost").inc()
            raise ToolUnavailableError(str(error)) from error
        return _result(self.name, work, outcome, self._config)

    async def release(self) -> None:
        """See `Tool`."""
        if self._session is not None:
            await self._session.close()


def offers(sandbox: Sandbox, config: SandboxConfig) -> tuple[ToolOffer, ...]:
    """All three tools, with timeouts above their own limits."""
    timeout_s = config.limits.max_wall_s + _EXTRA_S
    python, shell = PythonTool(sandbox, config), ShellTool(sandbox, config)
    return (
        ToolOffer.of(PythonTool, lambda: python, timeout_s=timeout_s),
        ToolOffer.of(ShellTool, lambda: shell, timeout_s=timeout_s),
        ToolOffer.of(
            PythonSessionTool, lambda: PythonSessionTool(sandbox, config), timeout_s=timeout_s
        ),
    )


def _work(mode: str, code: str, arguments: dict[str, Any], config: SandboxConfig) -> Work:
    files = arguments.get("files", {})
    limits = config.limits
    if sum(map(len, files.values())) > limits.max_transfer_bytes * 4 / 3:
        raise ValueError(f"files: more than {limits.max_transfer_bytes} bytes")
    return Work(
        mode,
        code,
        min(arguments.get("timeout_s", limits.wall_s), limits.max_wall_s),
        arguments.get("stdin", ""),
        files,
        tuple(arguments.get("outputs", ())),
    )


def _result(tool: str, work: Work, outcome: Execution, config: SandboxConfig) -> ToolOutput:
    limits = config.limits
    shown: dict[str, float] = {
        "wall_s": work.wall_s,
        "memory_bytes": limits.memory_bytes,
        "max_processes": limits.max_processes,
        "disk_bytes": limits.disk_bytes,
        "max_files": limits.max_files,
    }
    result = outcome.reason or ("ok" if outcome.is_ok else "failed")
    metrics.CALLS.labels(tool, result).inc()
    content = _json_of(outcome) if work.outputs else _text_of(outcome, shown)
    return ToolOutput(content, is_error=not outcome.is_ok)


def _text_of(outcome: Execution, limits: dict[str, float]) -> str:
    """For a model: output, errors, and one line in brackets for each thing to know."""
    notes = []
    if outcome.is_cut:
        notes.append("output was cut")
    if outcome.reason:
        notes.append(f"ended because {_REASONS[outcome.reason].format(**limits)}")
    elif outcome.exit_code < 0:
        notes.append(f"ended by {signal.Signals(-outcome.exit_code).name}")
    elif outcome.exit_code:
        notes.append(f"exit code {outcome.exit_code}")
    parts = (outcome.stdout.rstrip("\n"), outcome.stderr.rstrip("\n"), *(f"[{note}]" for note in notes))
    return "\n".join(part for part in parts if part)


def _json_of(outcome: Execution) -> str:
    """Everything, for callers that asked for files."""
    return json.dumps(
        {
            "exit_code": outcome.exit_code,
            "stdout": outcome.stdout,
            "stderr": outcome.stderr,
            "reason": outcome.reason,
            "output_was_cut": outcome.is_cut,
            "files": outcome.files,
            "refused_files": list(outcome.refused),
        }
    )
