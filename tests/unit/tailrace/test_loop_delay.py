"""The worst delay of an event loop is exported."""

from __future__ import annotations

import asyncio
import time

from tailrace.runtime.health import watch_loop_delay
from tests.world.samples import sample
from tests.world.serving import eventually

COUNT = "tailrace_runtime_event_loop_delay_seconds_count"
WORST = "tailrace_runtime_event_loop_worst_delay_seconds"


async def test_the_worst_delay_stays_after_the_loop_runs_freely_again() -> None:
    before = sample(COUNT)  # of this process, which may have had other loops
    watch = asyncio.create_task(watch_loop_delay())
    await asyncio.sleep(0)
    time.sleep(0.6)  # noqa: ASYNC251 - blocks the loop beyond the timer, which is due in 0.25 s
    await eventually(lambda: sample(COUNT) > before)
    worst = sample(WORST)
    assert worst > 0.3
    await eventually(lambda: sample(COUNT) > before + 1)
    watch.cancel()
    assert sample(WORST) >= worst
