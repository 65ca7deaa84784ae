"""The thread that checks and stages versions."""

from __future__ import annotations

import os
import sys
import threading

import pytest

from tailrace.weights.background import in_background


def priority() -> tuple[int, int]:
    thread_id = threading.get_native_id()
    return thread_id, os.getpriority(os.PRIO_PROCESS, thread_id)


@pytest.mark.skipif(sys.platform != "linux", reason="priorities of threads")
async def test_it_stands_behind_the_thread_that_asks_and_changes_no_other() -> None:
    own_id, own = priority()
    thread_id, lower = await in_background(priority)
    assert thread_id != own_id
    assert lower == min(19, own + 5)
    assert priority() == (own_id, own)


async def test_errors_reach_the_caller() -> None:
    with pytest.raises(ZeroDivisionError):
        await in_background(divmod, 1, 0)
