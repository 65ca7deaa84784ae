"""Files into and out of a call's folder, moved by the confined process itself.

Names may say what they like: a path that leads out of the folder fails like any other of its accesses.
"""

import base64
import glob
import os
import stat
from typing import Any


def put(files: dict[str, str]) -> None:
    """Write files (content in base64, by path) below the current folder."""
    for name, content in files.items():
        folder = os.path.dirname(name)
        if folder:
            os.makedirs(folder, exist_ok=True)
        with open(name, "wb") as file:
            file.write(base64.b64decode(content))


def collect(patterns: list[str], max_bytes: int) -> dict[str, Any]:
    """`files` (content in base64, by path) that match, `max_bytes` in all; `refused`: those that do not
    fit or are no regular files.
    """
    files: dict[str, str] = {}
    refused: list[str] = []
    for name in sorted({name for pattern in patterns for name in glob.glob(pattern, recursive=True)}):
        content = _content(name, max_bytes)
        if content is None:
            refused.append(name)
            continue
        max_bytes -= len(content)
        files[name] = base64.b64encode(content).decode()
    return {"files": files, "refused": refused}


def _content(name: str, max_bytes: int) -> bytes | None:
    """A regular file's content; None for anything else, and for what is too large."""
    try:
        fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    with open(fd, "rb") as file:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            return None
        content = file.read(max_bytes + 1)
    return content if len(content) <= max_bytes else None
