"""Descriptors and mappings of a process of a call, one by one, as `/proc` shows them.

An object that several processes hold counts once. Of a deleted file that is only mapped, the kernel
tells nobody the size: `Hidden` says so.
"""

import os
import socket
import stat
from dataclasses import dataclass, field
from typing import NamedTuple

from tailrace_sandbox.core.limits import MAX_WATCHED
from tailrace_sandbox.engine.workspace import BLOCK_BYTES

_LONGEST_MAPPING = 160  # bytes of a line; more of them on average count as too many lines
_MAPPING_FIELDS = 6  # of a line, the last is the path
_EVENTS = "anon_inode:[eventpoll]"
_WATCHED, _WATCHED_BYTES = b"tfd:", 128  # of a line for a descriptor that an epoll watches, at most

Key = tuple[int, int]  # device and inode of a file


def _socket_bytes() -> int:
    """Most that the queue of one socket holds: its sender's default bound, and half of it again."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        return 3 * ours.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) // 2


PIPE_BYTES = 65536
SOCKET_BYTES = _socket_bytes()
_OTHER_BYTES = 4096  # timers, events and epolls
WATCH_BYTES = 256  # of kernel memory for each descriptor that an epoll watches
_QUEUE_BYTES = {stat.S_IFSOCK: SOCKET_BYTES, stat.S_IFIFO: PIPE_BYTES}


class Queues(NamedTuple):
    """Pipes, sockets and other objects of all processes of a call."""

    num_bytes: int  # of memory, if all pipes and sockets are full
    num_sockets: int
    num_watched: int  # descriptors by epolls; counted until there are more than `MAX_WATCHED`


@dataclass
class Hidden:
    """Deleted files of a call in `folder`, which still take room on disk, with their bytes."""

    folder: str
    shown: dict[Key, int] = field(default_factory=dict)  # by a descriptor, or as a running program
    mapped: dict[Key, int] = field(default_factory=dict)  # the part that a process maps

    @property
    def num_bytes(self) -> int:
        """Bytes that are known."""
        return sum((self.mapped | self.shown).values())

    @property
    def is_larger(self) -> bool:
        """Tell whether a file may have more bytes than are known: it is mapped, and nothing else."""
        return not self.mapped.keys() <= self.shown.keys()


class Held:
    """Open descriptors of processes; puts deleted files into `hidden`."""

    def __init__(self, hidden: Hidden) -> None:
        self._hidden = hidden
        self._queues: dict[Key, int] = {}
        self._num_others = self._num_watched = 0

    def add(self, where: str) -> None:
        """Count what the process at this entry below `/proc` holds; nothing if it has ended."""
        try:
            self._keep_if_deleted(os.stat(f"{where}/exe"))
            folder = os.open(f"{where}/fd", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except (FileNotFoundError, ProcessLookupError):
            return
        try:
            for name in listed(folder):
                try:
                    self._add_object(where, name, folder)
                except FileNotFoundError:
                    continue  # closed meanwhile
        finally:
            os.close(folder)

    def _add_object(self, where: str, name: str, folder: int) -> None:
        found = os.stat(name, dir_fd=folder)
        kind = stat.S_IFMT(found.st_mode)
        if kind == stat.S_IFREG:
            self._keep_if_deleted(found)
        elif kind in _QUEUE_BYTES:
            self._queues[found.st_dev, found.st_ino] = _QUEUE_BYTES[kind]
        elif kind == 0:
            self._num_others += 1
            if os.readlink(name, dir_fd=folder) == _EVENTS:
                most_bytes = max(0, MAX_WATCHED + 1 - self._num_watched) * _WATCHED_BYTES
                self._num_watched += read(f"{where}/fdinfo/{name}", most_bytes).count(_WATCHED)

    def _keep_if_deleted(self, found: os.stat_result) -> None:
        if found.st_nlink == 0:
            self._hidden.shown[found.st_dev, found.st_ino] = found.st_blocks * BLOCK_BYTES

    def queues(self) -> Queues:
        """All of it but files."""
        others_bytes = self._num_others * _OTHER_BYTES + self._num_watched * WATCH_BYTES
        num_sockets = sum(held == SOCKET_BYTES for held in self._queues.values())
        return Queues(sum(self._queues.values()) + others_bytes, num_sockets, self._num_watched)


def mappings(where: str, most: int, hidden: Hidden) -> int:
    """Number of mappings of a process, counted until there are more than `most`.

    Puts deleted files of the call into `hidden`.
    """
    most_bytes = (most + 1) * _LONGEST_MAPPING
    text = read(f"{where}/maps", most_bytes)
    if len(text) >= most_bytes:
        return most + 1
    if b"(deleted)" in text:
        own = os.fsencode(f"{hidden.folder}/")
        for line in text.splitlines():
            fields = line.split(None, _MAPPING_FIELDS - 1)
            if line.endswith(b"(deleted)") and fields[-1].startswith(own):
                span, _, _, device, inode = fields[:5]
                begin, _, end = span.partition(b"-")
                major, _, minor = device.partition(b":")
                key = (os.makedev(int(major, 16), int(minor, 16)), int(inode))
                hidden.mapped[key] = max(int(end, 16) - int(begin, 16), hidden.mapped.get(key, 0))
    return text.count(b"\n")


def listed(path: str | int) -> list[str]:
    """Names in a folder below `/proc`; none when its process has ended."""
    try:
        return os.listdir(path)
    except (FileNotFoundError, ProcessLookupError):
        return []


def read(path: str, most_bytes: int = 1 << 20) -> bytes:
    """Content of a file below `/proc`; empty when its process has ended."""
    pieces = []
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            while most_bytes > 0 and (piece := os.read(fd, 65536)):
                pieces.append(piece)
                most_bytes -= len(piece)
        finally:
            os.close(fd)
    except (FileNotFoundError, ProcessLookupError):
        return b""
    return b"".join(pieces)
