"""Files that confined processes hand out."""

from __future__ import annotations

import json


def checked_files(data: str) -> tuple[dict[str, str], tuple[str, ...]]:
    """What a confined process says of its files, if it is of the right form; else nothing."""
    try:
        content = json.loads(data)
        files = {str(name): str(text) for name, text in content["files"].items()}
        refused = tuple(map(str, content["refused"]))
        json.dumps([files, refused], ensure_ascii=False).encode()
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return {}, ()
    return files, refused
