"""Bytes out of and into confined processes, without threads and with bounded buffers."""

import asyncio
import fcntl
import os
from collections.abc import Callable

_CHUNK_BYTES = 65536
_FLOOD = 64
_SEALS = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL


def sealed(data: bytes) -> int:
    """Descriptor from which `data` can be read and that allows nothing else."""
    fd = os.memfd_create("tailrace", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    while data:
        data = data[os.write(fd, data) :]
    os.lseek(fd, 0, os.SEEK_SET)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
    return fd


class Output:
    """The reading end of a pipe: keeps the first `max_bytes`, drops the rest.

    `on_flood` is called once, after 64 times `max_bytes`.
    """

    def __init__(self, max_bytes: int, on_flood: Callable[[], None]) -> None:
        self._max_bytes = max_bytes
        self._on_flood = on_flood
        self._kept = bytearray()
        self._num_seen = 0
        self._loop = asyncio.get_running_loop()
        self._read_fd, self.write_fd = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(self._read_fd, False)
        self.ended = asyncio.Event()
        self._loop.add_reader(self._read_fd, self.read)

    def read(self) -> None:
        """Take what is there."""
        if self.ended.is_set():
            return
        try:
            data = os.read(self._read_fd, _CHUNK_BYTES)
        except BlockingIOError:
            return
        if not data:
            self.close()
            return
        was_flooded = self._num_seen > _FLOOD * self._max_bytes
        self._num_seen += len(data)
        self._kept += data[: self._max_bytes - len(self._kept)]
        if not was_flooded and self._num_seen > _FLOOD * self._max_bytes:
            self._on_flood()

    def read_all(self) -> None:
        """Take all that was written until now."""
        num_seen = -1
        while num_seen != self._num_seen and not self.ended.is_set():
            num_seen = self._num_seen
            self.read()

    def take(self) -> tuple[str, bool]:
        """Text received since the last call, and whether some was dropped."""
        data, is_cut = self.take_raw()
        return data.decode(errors="replace"), is_cut

    def take_raw(self) -> tuple[bytes, bool]:
        """Bytes received since the last call, and whether some were dropped."""
        is_cut = self._num_seen > len(self._kept)
        return self.take_bytes(), is_cut

    def take_bytes(self) -> bytes:
        """Bytes received since the last call."""
        data = bytes(self._kept)
        self._kept.clear()
        self._num_seen = 0
        return data

    def close_write_end(self) -> None:
        """Close our write end, once the confined process has its own."""
        if self.write_fd >= 0:
            os.close(self.write_fd)
            self.write_fd = -1

    def close(self) -> None:
        """Stop reading."""
        self.close_write_end()
        if not self.ended.is_set():
            self._loop.remove_reader(self._read_fd)
            os.close(self._read_fd)
            self.ended.set()
