"""Boundary to user code: each exception of it becomes one typed error.

Used as `with foreign_code("env.step"): ...`. Cancellation and process exits pass through;
`foreign_call` takes an exit for an error too.
"""

import contextlib
from types import TracebackType

MAX_ERROR_CHARS = 20_000  # a reason goes into messages, logs and events
_STEPS_SHOWN = 3


class ForeignCodeError(Exception):
    """User code (an environment, a reward, a tool) raised `error`, in the call named `where`."""

    def __init__(self, where: str, error: Exception) -> None:
        super().__init__(f"{where} raised {told(error)}")
        self.where = where
        self.error = error


def told(error: BaseException) -> str:
    """Type and text of an error, as any message carries them; the text is the user's code."""
    text = "(its text cannot be computed)"
    with contextlib.suppress(Exception):
        text = str(error)
    if len(text) > MAX_ERROR_CHARS:
        text = f"{text[:MAX_ERROR_CHARS]}... ({len(text)} characters)"
    return f"{type(error).__name__}: {encodable(text)}"


def encodable(text: str) -> str:
    """The text without half surrogates, which JSON and msgpack cannot encode."""
    return text.encode("utf-8", "replace").decode()


def place_of(error: BaseException) -> str:
    """Lines of the user's code that led to the error, outermost first, in brackets; or nothing."""
    steps = []
    traceback = error.__traceback__
    while traceback is not None:
        code = traceback.tb_frame.f_code
        steps.append(f"{code.co_filename.rpartition('/')[2]}:{traceback.tb_lineno} {code.co_name}")
        traceback = traceback.tb_next
    return f" (at {' > '.join(steps[1:][:_STEPS_SHOWN])})" if len(steps) > 1 else ""


class foreign_code:  # noqa: N801  used like a statement
    """Turns an `Exception` of the body of the `with` into `ForeignCodeError`."""

    __slots__ = ("_where",)

    def __init__(self, where: str) -> None:
        self._where = where

    def __enter__(self) -> None:
        return None

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if isinstance(error, Exception):
            raise ForeignCodeError(self._where, error) from error


class ExitError(RuntimeError):
    """User code tried to end the process that called it."""


class foreign_call(foreign_code):  # noqa: N801  used like a statement
    """`foreign_code` that turns `SystemExit` too, so that the process goes on."""

    __slots__ = ()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if isinstance(error, SystemExit):
            told_exit = ExitError(f"it ended its process ({error!r}), as no code may that is called")
            told_exit.__traceback__ = error.__traceback__
            raise ForeignCodeError(self._where, told_exit) from error
        super().__exit__(kind, error, traceback)
