"""A process that stood still, as after Ctrl-Z and `fg`, has heard nobody: nobody is lost for that."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest

from tailrace.bus import CallTimeoutError
from tailrace.tools import calls, watch
from tailrace.tools.calls import Cancellation, WorkerCalls
from tailrace.tools.port import CallAttempt
from tailrace.tools.watch import ToolDeadlines, WorkerWatch
from tailrace_protos.tool import CallTool, ToolAccepted, ToolsProbed

STOOD_STILL_S = 100.0


@pytest.fixture
def stand_still(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Makes `STOOD_STILL_S` pass at once, on the clock of the running loop."""
    late_s = 0.0

    def pass_time() -> None:
        nonlocal late_s
        if not late_s:
            loop = asyncio.get_running_loop()
            machine_s = loop.time
            monkeypatch.setattr(loop, "time", lambda: machine_s() + late_s)
        late_s += STOOD_STILL_S

    return pass_time


class StalledPort:
    """The caller stands still within its first probe; later ones are answered, or none is."""

    def __init__(self, stand_still: Callable[[], None], *, answers: bool) -> None:
        self.bus = SimpleNamespace(connection=SimpleNamespace(is_connected=True))
        self.num_probes = 0
        self.answered = asyncio.Event()
        self._stand_still = stand_still
        self._answers = answers

    async def ask(self, subject: str, probe: Any, reply_type: object, timeout_s: float) -> ToolsProbed:
        self.num_probes += 1
        if self.num_probes == 1:
            self._stand_still()
        if self.num_probes == 1 or not self._answers:
            raise CallTimeoutError(subject, timeout_s)
        self.answered.set()
        return ToolsProbed(probe.call_ids, (), probe.session_ids)


def accepted() -> CallAttempt:
    attempt = CallAttempt(CallTool("c", "t"), "subject")
    attempt.accepted.set_result(ToolAccepted("c", "w"))
    return attempt


async def test_a_caller_that_stood_still_does_not_take_its_worker_for_dead(
    stand_still: Callable[[], None],
) -> None:
    port = StalledPort(stand_still, answers=True)
    made = WorkerWatch(port, ToolDeadlines(probe_s=0.01, silent_after_s=10.0))  # type: ignore[arg-type]
    attempt = accepted()
    made.add(attempt)
    async with asyncio.timeout(2 * STOOD_STILL_S):
        await port.answered.wait()
    assert not attempt.result.done()
    await made.close()


async def test_a_worker_that_stays_silent_is_dead_all_the_same(stand_still: Callable[[], None]) -> None:
    port = StalledPort(stand_still, answers=False)
    made = WorkerWatch(port, ToolDeadlines(probe_s=0.01, silent_after_s=0.1))  # type: ignore[arg-type]
    attempt = accepted()
    made.add(attempt)
    with pytest.raises(watch.WorkerLostError, match="answers no probe"):
        await attempt.result
    assert port.num_probes > 2
    await made.close()


async def test_a_worker_that_stood_still_ends_no_call_whose_caller_could_not_be_heard(
    stand_still: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calls, "SWEEP_S", 0.01)
    ended: list[str] = []

    def spawn(work: Awaitable[Any], what: str) -> None:
        ended.append(what)
        work.close()  # type: ignore[attr-defined]

    held = WorkerCalls()
    held.session_leases.begin("session", 15.0, asyncio.get_running_loop().time())
    looks: list[bool] = []

    def is_connected() -> bool:
        looks.append(True)
        return True

    host: Any = SimpleNamespace()
    sweeping = asyncio.create_task(Cancellation(held, host, is_connected, spawn).sweep())
    while not looks:
        await asyncio.sleep(0.001)
    stand_still()
    num_looks = len(looks)
    while len(looks) < num_looks + 2:
        await asyncio.sleep(0.001)
    sweeping.cancel()
    assert ended == []
