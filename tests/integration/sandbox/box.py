"""A sandbox for tests: a real runner on a loop in a thread, asked from plain test functions."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Coroutine
from typing import Any, TypeVar

from tailrace_sandbox.adapters.place import prepare
from tailrace_sandbox.adapters.runner import Runner
from tailrace_sandbox.config import CallLimits, SandboxConfig
from tailrace_sandbox.ports import Execution, Work

MIB = 1024 * 1024
DEADLINE_S = 90.0

# Small, so that a bomb that works does little harm and a test takes little time.
LIMITS = CallLimits(
    wall_s=30.0,
    memory_bytes=96 * MIB,
    max_processes=12,
    disk_bytes=4 * MIB,
    max_files=64,
    max_open_files=48,
    max_output_bytes=4096,
)
CONFIG = SandboxConfig(limits=LIMITS, max_concurrency=1, max_sessions=2)

T = TypeVar("T")


class Box:
    """Calls as blocking functions."""

    def __init__(self, config: SandboxConfig = CONFIG) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self.place = self.wait(prepare(config))
        self.runner = self.wait(self._make_runner())

    async def _make_runner(self) -> Runner:
        return Runner(self.place)

    def wait(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """The coroutine's result, from the sandbox's own loop."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(DEADLINE_S)

    def python(self, code: str, **more: Any) -> Execution:
        """One program."""
        return self.wait(
            self.runner.run(Work("python", code, more.pop("wall_s", LIMITS.wall_s), **more))
        )

    def shell(self, command: str, **more: Any) -> Execution:
        """One command line."""
        return self.wait(
            self.runner.run(Work("shell", command, more.pop("wall_s", LIMITS.wall_s), **more))
        )

    def folders(self) -> list[str]:
        """Folders of calls that are there."""
        return [name for name in os.listdir(self.place.base) if name.startswith("call-")]

    def leaves_no_folder(self) -> bool:
        """Waits until the folders of all calls are removed; returns whether they are."""
        give_up_s = time.monotonic() + DEADLINE_S
        while self.folders() and time.monotonic() < give_up_s:
            time.sleep(0.01)
        return not self.folders()

    def close(self) -> None:
        """End everything."""
        self.wait(self.runner.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(DEADLINE_S)
        self._loop.close()
