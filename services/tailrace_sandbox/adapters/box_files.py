"""Files into and out of a box by programs that every image has: `tar`, `find` and `head`."""

import io
import tarfile
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import PurePosixPath

from tailrace_sandbox.adapters.box import Box, BoxCommand
from tailrace_sandbox.engine.files import Collected

UNPACK = ("tar", "-x", "-f", "-")
_TIMEOUT_S = 30.0
_MAX_LIST_BYTES = 4 << 20
_MAX_FILES = 64  # that come back from one call; each is a command of its own
_BETWEEN = "/"  # no name looks like this
_LIST = "find . {depth} -type f -print0; printf '/\\0'; find . {depth} ! -type f ! -type d -print0"


def packed(files: dict[str, bytes]) -> bytes:
    """Archive of files by path; blocking."""
    target = io.BytesIO()
    with tarfile.open(fileobj=target, mode="w", format=tarfile.GNU_FORMAT) as archive:
        for name, content in files.items():
            entry = tarfile.TarInfo(name)
            entry.size, entry.mode = len(content), 0o644
            archive.addfile(entry, io.BytesIO(content))
    return target.getvalue()


async def collected(box: Box, patterns: tuple[str, ...], max_bytes: int) -> Collected:
    """Files that match one of the patterns, `max_bytes` of them and 64 in all.

    Where there are too many files to list, the patterns themselves are refused.
    """
    listing = _LIST.format(depth=_depth(patterns))
    listed = await box.execute(
        BoxCommand(("/bin/sh", "-c", listing), _TIMEOUT_S, max_output_bytes=_MAX_LIST_BYTES)
    )
    regular, others = _names(listed.stdout)
    wanted = [name for name in regular if _is_wanted(name, patterns)]
    files: dict[str, bytes] = {}
    refused = [name for name in others if _is_wanted(name, patterns)]
    refused += patterns if listed.is_cut else ()
    for number, name in enumerate(sorted(wanted)):
        if number >= _MAX_FILES:
            refused.append(name)
            continue
        argv = ("head", "-c", str(max_bytes + 1), f"./{name}")
        answer = await box.execute(BoxCommand(argv, _TIMEOUT_S, max_output_bytes=max_bytes + 1))
        if answer.exit_code or answer.reason or len(answer.stdout) > max_bytes:
            refused.append(name)
            continue
        max_bytes -= len(answer.stdout)
        files[_text(name)] = answer.stdout
    return Collected(0, files, tuple(map(_text, refused)))


def _text(name: str) -> str:
    """A name whose bytes are no UTF-8 as text that JSON can hold."""
    return name.encode(errors="surrogateescape").decode(errors="replace")


def _names(listed: bytes) -> tuple[list[str], list[str]]:
    """Names of regular files, and of everything else but folders."""
    names = listed.decode(errors="surrogateescape").split("\0")
    middle = names.index(_BETWEEN) if _BETWEEN in names else len(names)
    return [n[2:] for n in names[:middle] if n], [n[2:] for n in names[middle + 1 :] if n]


def _is_wanted(name: str, patterns: tuple[str, ...]) -> bool:
    return any(_matches(name.split("/"), _parts(pattern)) for pattern in patterns)


def _parts(pattern: str) -> list[str]:
    return [part for part in PurePosixPath(pattern).parts if part != "."]


def _depth(patterns: tuple[str, ...]) -> str:
    """Option of `find` that spares folders in which nothing can match."""
    parts = [_parts(pattern) for pattern in patterns]
    if any("**" in each for each in parts):
        return ""
    return f"-maxdepth {max((len(each) for each in parts), default=0)}"


def _matches(names: list[str], parts: list[str]) -> bool:
    """Tell whether a path matches a pattern as `glob` does: `**` stands for any number of folders."""
    reached = {0}  # numbers of parts that the names so far can have used up
    for name in names:
        reached = set(_next(name, parts, _over_stars(parts, reached)))
    return len(parts) in _over_stars(parts, reached)


def _over_stars(parts: list[str], reached: set[int]) -> set[int]:
    found = set(reached)
    for index, part in enumerate(parts):
        if index in found and part == "**":
            found.add(index + 1)
    return found


def _next(name: str, parts: list[str], reached: set[int]) -> Iterator[int]:
    for index in reached:
        if index == len(parts):
            continue
        part = parts[index]
        is_shown = not name.startswith(".") or part.startswith(".")
        if part == "**":
            if is_shown:
                yield index
        elif is_shown and fnmatchcase(name, part):
            yield index + 1
