"""Limit of the processor time of a computation on texts that a model or a client wrote."""

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType

MAX_CPU_S = 2.0
_AGAIN_S = 0.5  # where a destructor swallows the error


class TooSlowError(BaseException):
    """A computation used up its time. Not an `Exception`, so that no library swallows it."""


@contextlib.contextmanager
def cpu_limit(seconds: float) -> Iterator[None]:
    """Raises `TooSlowError` in the body after so much processor time; in the main thread only."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = signal.signal(signal.SIGVTALRM, _give_up)
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds, _AGAIN_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0.0)
        signal.signal(signal.SIGVTALRM, previous)


def _give_up(number: int, frame: FrameType | None) -> None:
    if frame is None or frame.f_code.co_filename not in _ENDS_LIMITS:
        raise TooSlowError


# Raised in here, the error would leave the timer on. As the code names it: `__file__` may be a .pyc.
_ENDS_LIMITS = {each.__code__.co_filename for each in (_give_up, contextlib.contextmanager)}
