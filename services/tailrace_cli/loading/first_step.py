"""First step of an environment that is checked: an empty reply, which every environment has to answer.

A step may be slow work, as a test suite is. It is given up after `MAX_STEP_S` at most, and that is no
problem.
"""

import asyncio
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from tailrace.foreign import ForeignCodeError, place_of
from tailrace_agents.core.environments import EnvAnswerError, EnvHandle

MAX_STEP_S = 10.0
"""Time of a first step that is waited for."""


class SlowStepError(BaseException):
    """A step used up its time. Not an `Exception`, so that no environment swallows it."""


def notes_of_first_step(handle: EnvHandle, key: str, max_step_s: float = MAX_STEP_S) -> Iterator[str]:
    """Gives an environment an empty reply; yields a note if it raises.

    Raises `ForeignCodeError` for an answer that no episode can use.
    """
    try:
        with _wall_limit(max_step_s):
            asyncio.run(handle.step(""))
    except SlowStepError:
        return
    except ForeignCodeError as error:
        if isinstance(error.error, EnvAnswerError):
            raise
        yield (
            f"{key}: an empty reply made it fail ({error}{place_of(error.error)}): answer replies that "
            "it cannot read with an observation"
        )


@contextmanager
def _wall_limit(seconds: float) -> Iterator[None]:
    """Raises `SlowStepError` in the body after so much time; in the main thread alone."""
    previous = signal.signal(signal.SIGALRM, _give_up)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, previous)


def _give_up(number: int, frame: FrameType | None) -> None:
    raise SlowStepError
