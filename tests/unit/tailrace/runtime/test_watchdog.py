"""The watchdog of an event loop interrupts the code that holds it, and no other."""

from __future__ import annotations

import threading

import pytest

from tailrace.runtime import watchdog
from tailrace.runtime.watchdog import LoopBlockedError, LoopWatchdog


class SlowLog:
    """Log in whose time the interruptible code ends."""

    def __init__(self, leave: threading.Event, left: threading.Event) -> None:
        self._leave = leave
        self._left = left

    def error(self, *_: object, **__: object) -> None:
        self._leave.set()
        assert self._left.wait(60)


def test_code_that_ended_while_it_was_logged_is_not_interrupted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    entered, leave, left, end = (threading.Event() for _ in range(4))
    interrupted: list[LoopBlockedError] = []

    def holds() -> None:
        entered.set()
        leave.wait(60)

    def run() -> None:
        try:
            holds()
            left.set()
            end.wait(60)
        except LoopBlockedError as error:
            interrupted.append(error)

    loop = threading.Thread(target=run)
    loop.start()
    assert entered.wait(60)
    watching = LoopWatchdog(1.0, (holds.__code__,))
    watching._loop_thread = loop.ident or 0
    monkeypatch.setattr(watchdog, "log", SlowLog(leave, left))
    watching._alarm(1.0)
    end.set()
    loop.join(60)
    assert interrupted == []
