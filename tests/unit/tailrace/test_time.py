"""Clocks and back-off."""

from __future__ import annotations

import time

from hypothesis import given
from hypothesis import strategies as st

from tailrace.clock import MAX_GAP_S, SteadyClock, SystemClock
from tailrace.retry import Backoff


async def test_the_system_clock_is_the_systems() -> None:
    clock = SystemClock()
    before = time.time()
    started_s = clock.monotonic_s()
    await clock.sleep(0.01)
    assert clock.monotonic_s() - started_s >= 0.009
    assert before <= clock.unix_s() <= time.time()


@given(
    first_s=st.floats(0.001, 1.0),
    factor=st.floats(1.0, 4.0),
    jitter=st.floats(0.0, 0.9),
    n=st.integers(1, 40),
)
def test_delays_grow_to_the_limit_and_start_again(
    first_s: float, factor: float, jitter: float, n: int
) -> None:
    backoff = Backoff(first_s, 5.0, factor=factor, jitter=jitter)
    for power in range(n):
        bound_s = min(first_s * factor**power, 5.0)
        assert bound_s * (1 - jitter) * 0.999 <= backoff.next_s() <= bound_s * 1.001
    assert backoff.num_failures == n
    backoff.reset()
    assert backoff.num_failures == 0
    assert backoff.next_s() <= first_s


class SetClock(SystemClock):
    """A machine's clock, set by the test."""

    def __init__(self) -> None:
        self.wall_s, self.passed_s = 1e9, 5.0

    def unix_s(self) -> float:  # type: ignore[override]
        return self.wall_s

    def monotonic_s(self) -> float:  # type: ignore[override]
        return self.passed_s


def test_a_steady_clock_neither_jumps_nor_counts_a_pause() -> None:
    machine = SetClock()
    clock = SteadyClock(machine)
    machine.passed_s += 1000.0
    assert clock.unix_s() == 1e9
    clock.begin()
    machine.wall_s, machine.passed_s = machine.wall_s + 3600.0, machine.passed_s + 0.5
    assert clock.unix_s() == 1e9 + 0.5
    machine.wall_s, machine.passed_s = 0.0, machine.passed_s + 0.25
    assert clock.unix_s() == 1e9 + 0.75
    machine.passed_s += 3600.0
    assert clock.unix_s() == 1e9 + 0.75 + MAX_GAP_S
    assert clock.monotonic_s() == machine.passed_s
