"""The folder of a call: made for it, measured while it runs, removed with everything in it.

Whatever the tool code did to the folder (links to elsewhere, folders a thousand deep, modes that keep
everybody out), nothing here follows a link, needs a long path or recurses.
"""

import contextlib
import os
import secrets
import stat
from typing import NamedTuple

BLOCK_BYTES = 512
CALL_PREFIX = "call-"
_MAX_DEPTH = 64
_TRIAL_FILES, _TRIAL_BYTES = 4, 1 << 18
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW


class UninspectableError(Exception):
    """Files of a call cannot be measured, so that its limits cannot be enforced."""


class Usage(NamedTuple):
    """Files and bytes on disk."""

    num_files: int
    num_bytes: int


class Room(NamedTuple):
    """Free bytes and free files of a file system."""

    num_bytes: int
    num_files: int


def room(path: str) -> Room:
    """Room on the file system of `path`."""
    found = os.statvfs(path)
    return Room(found.f_bfree * found.f_frsize, found.f_ffree)


def tells_room(base: str) -> bool:
    """Tell whether the file system of `base` has less room at once when something is written there."""
    folder = create(base)
    try:
        before = room(folder)
        for number in range(_TRIAL_FILES):
            with open(f"{folder}/{number}", "wb") as file:
                file.write(os.urandom(_TRIAL_BYTES))
        after = room(folder)
    finally:
        remove(folder)
    return (
        before.num_bytes - after.num_bytes >= _TRIAL_FILES * _TRIAL_BYTES
        and before.num_files - after.num_files >= _TRIAL_FILES
    )


def create(base: str) -> str:
    """A new, empty folder under `base` with a name that nobody can guess."""
    path = f"{base}/{CALL_PREFIX}{os.urandom(12).hex()}"
    os.mkdir(path, 0o700)
    return path


def measure(path: str, max_files: int) -> Usage:
    """Bytes and number of what is below `path`, until there are more than `max_files`.

    Raises `UninspectableError`.
    """
    num_files = num_bytes = 0
    waiting = [(path, 0)]
    while waiting and num_files <= max_files:
        folder, depth = waiting.pop()
        if depth > _MAX_DEPTH:
            raise UninspectableError(f"folders more than {_MAX_DEPTH} deep")
        try:
            with os.scandir(folder) as entries:
                for entry in entries:
                    num_files += 1
                    num_bytes += _bytes_of(entry)
                    if entry.is_dir(follow_symlinks=False):
                        waiting.append((entry.path, depth + 1))
        except (FileNotFoundError, NotADirectoryError):
            continue  # removed meanwhile
        except OSError as error:
            raise UninspectableError(f"a folder cannot be read: {error.strerror}") from error
    return Usage(num_files, num_bytes)


def _bytes_of(entry: os.DirEntry[str]) -> int:
    try:
        return entry.stat(follow_symlinks=False).st_blocks * BLOCK_BYTES
    except FileNotFoundError:
        return 0


def remove(path: str) -> None:
    """Remove the folder and all below it; nothing may use it any more.

    Folders are moved to the top before they are opened, so that no path gets long.
    """
    top = _open(path)
    try:
        waiting = _empty(top, top)
        while waiting:
            name = waiting.pop()
            folder = _open(name, top)
            try:
                waiting += _empty(folder, top)
            finally:
                os.close(folder)
            os.rmdir(name, dir_fd=top)
    finally:
        os.close(top)
    os.rmdir(path)


def _open(name: str, parent: int | None = None) -> int:
    """A descriptor of a folder that may be read and written from now on.

    Modes are changed by name only where they keep us out, which they never do to root: a name could be
    a link by now.
    """
    try:
        folder = os.open(name, _FOLDER, dir_fd=parent)
    except PermissionError:
        os.chmod(name, 0o700, dir_fd=parent)
        folder = os.open(name, _FOLDER, dir_fd=parent)
    os.fchmod(folder, 0o700)
    return folder


def _empty(folder: int, top: int) -> list[str]:
    """Unlink what is in `folder`; its folders go to the top, under the returned names."""
    moved = []
    for index, entry in enumerate(os.listdir(folder)):
        if not stat.S_ISDIR(os.stat(entry, dir_fd=folder, follow_symlinks=False).st_mode):
            os.unlink(entry, dir_fd=folder)
            continue
        with contextlib.suppress(OSError):  # most are empty
            os.rmdir(entry, dir_fd=folder)
            continue
        fresh = f"{secrets.token_hex(8)}-{index}"
        _move(entry, folder, fresh, top)
        moved.append(fresh)
    return moved


def _move(entry: str, folder: int, fresh: str, top: int) -> None:
    try:
        os.rename(entry, fresh, src_dir_fd=folder, dst_dir_fd=top)
    except PermissionError:  # a folder that moves is written to
        os.chmod(entry, 0o700, dir_fd=folder)
        os.rename(entry, fresh, src_dir_fd=folder, dst_dir_fd=top)
