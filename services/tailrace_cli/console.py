"""The terminal's console: it prints texts as they are, square brackets and colons included."""

from typing import Any

from rich.console import Console


def plain_console(**options: Any) -> Console:
    """Console without markup, emoji names and guessed colours; `options` are those of rich."""
    return Console(markup=False, highlight=False, emoji=False, **options)
