"""The terminal's consoles: they print texts as they are, square brackets and colons included.

`stdout` gets what a command is asked for and a script may read: tables, figures, configurations.
Errors, warnings, notices and progress go to `stderr`.

Models, tools and logs write much of what is printed. No text of theirs may move the cursor, change the
title, write to the clipboard or turn the direction of letters: its control characters are shown.
"""

from collections.abc import Callable, Iterable
from typing import IO, Any, cast

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

# Control characters but tab and line feed, and marks of direction: as pictures (C0), else as U+FFFD.
_DIRECTIONS = (*range(0x202A, 0x202F), *range(0x2066, 0x206A), 0x200E, 0x200F, 0x061C)
_SHOWN = {
    **{code: 0x2400 + code for code in range(0x20) if code not in (0x09, 0x0A)},
    0x7F: 0x2421,
    **dict.fromkeys((*range(0x80, 0xA0), *_DIRECTIONS), 0xFFFD),
}
_PLAIN: dict[str, Any] = {"markup": False, "highlight": False, "emoji": False}


class _SafeConsole(Console):
    """Console whose renderables reach the terminal without control characters."""

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        """Segments of a renderable; those that rich makes to control the terminal stay."""
        for segment in super().render(renderable, options):
            if segment.control or segment.text.isprintable():
                yield segment
            else:
                yield Segment(segment.text.translate(_SHOWN), segment.style)


class _Lossy:
    """Stream that loses what cannot be written, as on a full disk; a broken pipe stays an error."""

    def __init__(self, stream: IO[str]) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """See `io.TextIOBase`."""
        self._unless_refused(lambda: self._stream.write(text))
        return len(text)

    def flush(self) -> None:
        """See `io.TextIOBase`."""
        self._unless_refused(self._stream.flush)

    def _unless_refused(self, work: Callable[[], object]) -> None:
        try:
            work()
        except OSError as error:
            if isinstance(error, BrokenPipeError):
                raise


class _NoticeConsole(_SafeConsole):
    """Console on which nothing depends: a run goes on, and ends, where no notice can be written."""

    @property
    def file(self) -> IO[str]:
        """Stream of errors."""
        return cast(IO[str], _Lossy(super().file))

    @file.setter
    def file(self, new_file: IO[str]) -> None:
        self._file = new_file


def plain_console(**options: Any) -> Console:
    """Console without markup, emoji names and guessed colours; `options` are those of rich."""
    return _SafeConsole(**_PLAIN, **options)


def tell(message: str) -> None:
    """Print a notice."""
    stderr.print(message, style="yellow", soft_wrap=True)


def tell_error(message: object) -> None:
    """Print the error that a command ends with."""
    stderr.print(f"error: {message}", style="red", soft_wrap=True)


stdout = plain_console()
stderr = _NoticeConsole(stderr=True, **_PLAIN)
