"""Files into and out of a call's folder, moved by the confined process itself.

Names may say what they like: a path that leads out of the folder fails like any other of its accesses.
What comes out has lengths in front and nothing to parse, so that reading it takes the service as long
as copying it, whatever tool code wrote there.
"""

import glob
import os
import re
import stat
import struct
from typing import NamedTuple

HEAD = struct.Struct("<iHH")  # exit code, number of files, number of refused names
_ENTRY = struct.Struct("<HI")  # bytes of a name, and of its content
LEFT = 1 << 8  # beside the exit code of a session that ends with this call
_MAX_NAMES = 1024
_MAX_NAME_BYTES = 4096
MAX_OTHER_BYTES = HEAD.size + _MAX_NAMES * (_ENTRY.size + _MAX_NAME_BYTES)


class Collected(NamedTuple):
    """Answer of a confined process. `refused`: files that do not fit or are no regular files."""

    exit_code: int
    files: dict[str, bytes]
    refused: tuple[str, ...]


def put(files: dict[str, bytes]) -> None:
    """Write files by path below the current folder; raises `ValueError` with a reason for the model."""
    for name, content in files.items():
        try:
            os.makedirs(os.path.dirname(name) or ".", exist_ok=True)
            with open(name, "wb", opener=_at_once) as file:
                file.write(content)
        except (OSError, ValueError, RecursionError) as error:  # the last for thousands of folders
            reason = getattr(error, "strerror", None) or str(error)
            raise ValueError(f"files: cannot write {name!r}: {reason}") from error


def _at_once(name: str, flags: int) -> int:
    """Open without a wait for the other end of a pipe."""
    return os.open(name, flags | os.O_NONBLOCK, 0o666)


def collect(exit_code: int, patterns: list[str], max_bytes: int) -> bytes:
    """Files that match, `max_bytes` of content and 1024 names in all, as `unpacked` reads them."""
    # Each `**` in a row tries every folder again, and finds no more than one does.
    simple = {re.sub(r"(\*\*/)+", "**/", pattern) for pattern in patterns}
    names = {name for pattern in simple for name in glob.glob(pattern, recursive=True)}
    files: list[bytes] = []
    left_out: list[bytes] = []
    for name in sorted(names)[:_MAX_NAMES]:
        encoded = os.fsencode(name)[:_MAX_NAME_BYTES]
        content = _content(name, max_bytes)
        if content is None:
            left_out.append(_ENTRY.pack(len(encoded), 0) + encoded)
            continue
        max_bytes -= len(content)
        files.append(_ENTRY.pack(len(encoded), len(content)) + encoded + content)
    return b"".join((HEAD.pack(exit_code, len(files), len(left_out)), *files, *left_out))


def refused(exit_code: int, patterns: list[str]) -> bytes:
    """Answer of a call whose files cannot be collected, as `unpacked` reads it: names the patterns."""
    names = [pattern.encode(errors="replace")[:_MAX_NAME_BYTES] for pattern in patterns[:_MAX_NAMES]]
    entries = (_ENTRY.pack(len(name), 0) + name for name in names)
    return b"".join((HEAD.pack(exit_code, 0, len(names)), *entries))


def unpacked(data: bytes) -> Collected:
    """Answer of a confined process; raises `ValueError` for anything that `collect` never says."""
    try:
        exit_code, num_files, num_refused = HEAD.unpack_from(data)
        if num_files + num_refused > _MAX_NAMES:
            raise ValueError("too many names")
        offset, found = HEAD.size, []
        for _ in range(num_files + num_refused):
            name_bytes, content_bytes = _ENTRY.unpack_from(data, offset)
            begin = offset + _ENTRY.size
            offset = begin + name_bytes + content_bytes
            name = data[begin : begin + name_bytes].decode(errors="replace")
            found.append((name, data[begin + name_bytes : offset]))
    except struct.error as error:
        raise ValueError(str(error)) from error
    if offset != len(data):
        raise ValueError("lengths that do not add up")
    return Collected(exit_code, dict(found[:num_files]), tuple(name for name, _ in found[num_files:]))


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
