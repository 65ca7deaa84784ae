"""The limit of processor time stops its body, and strikes nothing else."""

from __future__ import annotations

import signal
from itertools import chain, repeat

import pytest

from tailrace.cpu_limit import TooSlowError, cpu_limit


def test_a_body_that_computes_on_is_stopped() -> None:
    """A loop without end; then no timer is left."""
    with pytest.raises(TooSlowError), cpu_limit(0.01):
        all(not number for number in repeat(0))
    assert signal.getitimer(signal.ITIMER_VIRTUAL) == (0.0, 0.0)


def test_a_limit_that_comes_as_its_body_ends_leaves_no_timer() -> None:
    """Compiled code that fails after the limit: Python sees the signal in the limit's own end."""
    before = signal.getsignal(signal.SIGVTALRM)
    with pytest.raises(TypeError), cpu_limit(0.01):
        max(chain(repeat(1, 10_000_000), ["text"]))
    assert signal.getitimer(signal.ITIMER_VIRTUAL) == (0.0, 0.0)
    assert signal.getsignal(signal.SIGVTALRM) is before
