"""The program `docker`: orders to its daemon, and commands of bounded time and output in containers."""

import asyncio
import os
from collections.abc import Sequence

from tailrace.config import ConfigError
from tailrace_sandbox.adapters.box import BoxAnswer, BoxCommand
from tailrace_sandbox.adapters.pipes import Output, sealed
from tailrace_sandbox.ports import SandboxLostError

_ORDER_S = 60.0  # for an order that neither pulls an image nor runs tool code
_MAX_ERROR_BYTES = 65536
_KEPT_VARIABLES = ("PATH", "HOME", "XDG_RUNTIME_DIR")


class Docker:
    """The program `docker`."""

    def __init__(self, program: str) -> None:
        self._program = program
        self.environment = {
            name: value
            for name, value in os.environ.items()
            if name in _KEPT_VARIABLES or name.startswith("DOCKER_")
        }

    async def order(self, *argv: str, within_s: float = _ORDER_S) -> tuple[int, str, str]:
        """Exit code, output and last line of the errors of an order to the daemon."""
        answer = await self.answer(argv, BoxCommand(argv, within_s, max_output_bytes=_MAX_ERROR_BYTES))
        if answer.reason:
            raise SandboxLostError(f"docker {argv[0]} did not end within {within_s:g} s")
        lines = answer.stderr.decode(errors="replace").strip().splitlines()
        return answer.exit_code, answer.stdout.decode(errors="replace"), lines[-1] if lines else ""

    async def answer(self, argv: tuple[str, ...], command: BoxCommand) -> BoxAnswer:
        """Run the program; a command that ends too late or writes too much is left behind."""
        flooded = asyncio.Event()
        outputs = tuple(Output(command.max_output_bytes, flooded.set) for _ in range(2))
        stdin = sealed(command.stdin)
        process = None
        try:
            process = await self._start(argv, stdin, [output.write_fd for output in outputs])
            for output in outputs:
                output.close_write_end()
            reason = await _end(process, flooded, command.wall_s)
            if not reason:
                await asyncio.gather(*(output.ended.wait() for output in outputs))
            return _answer(process.returncode or 0, outputs, reason)
        finally:
            os.close(stdin)
            if process is not None and process.returncode is None:
                process.kill()
            for output in outputs:
                output.close()

    async def _start(
        self, argv: tuple[str, ...], stdin: int, outputs: Sequence[int]
    ) -> asyncio.subprocess.Process:
        try:
            return await asyncio.create_subprocess_exec(
                self._program, *argv, env=self.environment, stdin=stdin,
                stdout=outputs[0], stderr=outputs[1], start_new_session=True,
            )  # fmt: skip
        except (FileNotFoundError, PermissionError, NotADirectoryError) as error:
            raise ConfigError(f"sandbox.docker.program: {error}") from error
        except OSError as error:  # this machine has no memory or process left
            raise SandboxLostError(f"docker {argv[0]} cannot be started: {error}") from error


def _answer(exit_code: int, outputs: Sequence[Output], reason: str) -> BoxAnswer:
    (stdout, is_cut), (stderr, is_cut_too) = (output.take_raw() for output in outputs)
    return BoxAnswer(exit_code, stdout, stderr, reason, is_cut or is_cut_too)


async def _end(process: asyncio.subprocess.Process, flooded: asyncio.Event, wall_s: float) -> str:
    """Wait for the end; the limit that came first, or nothing."""
    waits = [asyncio.ensure_future(process.wait()), asyncio.ensure_future(flooded.wait())]
    try:
        await asyncio.wait(waits, timeout=wall_s, return_when=asyncio.FIRST_COMPLETED)
        if flooded.is_set():
            return "output"
        return "" if waits[0].done() else "wall_clock"
    finally:
        for wait in waits:
            wait.cancel()
