"""Lines of the services' logs, in a form for people."""

import json
from collections.abc import Iterable, Iterator

from rich.console import Console
from rich.text import Text

_HIDDEN = {"timestamp", "level", "event", "module", "service", "instance_id", "run", "exception"}
_LEVELS = {"warning": "yellow", "error": "red", "critical": "red"}


def readable(process: str, line: str, told: str) -> tuple[str, Text]:
    """Time and text of a line of JSON or of any other, which gets the time `told`."""
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError):
        fields = None
    if not isinstance(fields, dict) or "event" not in fields:
        return told, Text(f"{'':8} {process:<12} {line}", style="dim")
    told = str(fields.get("timestamp", told))
    level = str(fields.get("level", ""))
    text = Text(f"{told[11:19]} {process:<12} ", style="dim")
    text.append(str(fields["event"]), style=_LEVELS.get(level, "not dim"))
    for key, value in fields.items():
        if key not in _HIDDEN:
            text.append(f" {key}={value}", style="dim")
    for said in _exception_lines(fields.get("exception")):
        text.append(f"\n{'':9}{said}", style="red")
    return told, text


def _exception_lines(exception: object) -> Iterator[str]:
    """Types, texts and places of an exception and its causes, innermost frame last."""
    errors = exception if isinstance(exception, list) else [exception] if exception else []
    for error in errors:
        if not isinstance(error, dict):
            yield str(error)
            continue
        yield f"{error.get('exc_type')}: {error.get('exc_value')}"
        for frame in error.get("frames") or ():
            yield f"  {frame.get('filename')}:{frame.get('lineno')} {frame.get('name')}"


def print_log(console: Console, lines: Iterable[tuple[str, Text]]) -> None:
    """Print lines that `readable` made."""
    for _, text in lines:
        console.print(text, soft_wrap=True)
